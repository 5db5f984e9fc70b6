"""The server's side of the app."""

from pathlib import Path

from evenhand.flower import server_app

app = server_app(Path(__file__).with_name("deployment.toml"))
