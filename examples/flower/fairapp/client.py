"""A client's side of the app."""

from pathlib import Path

from evenhand.flower import site_client

app = site_client(Path(__file__).with_name("deployment.toml"))
