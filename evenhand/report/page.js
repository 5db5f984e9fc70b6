"use strict";
// What a page does beyond standing there: says what a mark is (pointer and arrow keys), brings a series or a client to
// the front in all charts, finds a client by name, copies the command. Without it everything is still drawn.
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const body = document.body;
  body.classList.add("scripted");
  const tip = body.appendChild(document.createElement("div"));
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("role", "status");

  // A mark's words stand in its <title>, which the browser would show as well.
  const words = new Map();
  for (const title of all("main svg title")) {
    words.set(title.parentNode, title.textContent);
    title.remove();
  }

  const show = (mark, x, y) => {
    tip.textContent = words.get(mark);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - width - 6)) + "px";
    tip.style.top = (y + 18 + height > innerHeight ? Math.max(4, y - height - 12) : y + 18) + "px";
  };
  const hide = () => { tip.hidden = true; };

  addEventListener("pointermove", (event) => {
    const mark = event.target.closest && event.target.closest("main svg *");
    words.has(mark) ? show(mark, event.clientX, event.clientY) : hide();
  });
  addEventListener("scroll", hide, { passive: true });

  // Arrow keys walk over the marks of the chart that has the focus.
  for (const chart of all("main section svg[tabindex]")) {
    const marks = all("*", chart).filter((mark) => words.has(mark) && !mark.matches(".line, .axis, .front"));
    if (!marks.length) continue;
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10, PageUp: -10 };
    let at = -1;
    const leave = () => { if (marks[at]) marks[at].classList.remove("here"); hide(); };
    const go = (to) => {
      leave();
      at = Math.max(0, Math.min(marks.length - 1, to));
      marks[at].classList.add("here");
      const box = marks[at].getBoundingClientRect();
      show(marks[at], box.right, box.top + box.height / 2);
    };
    chart.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return leave();
      if (event.key === "Home") go(0);
      else if (event.key === "End") go(marks.length - 1);
      else if (event.key === "Enter" && marks[at] && marks[at].dataset.client) pick(marks[at].dataset.client);
      else if (event.key in steps) go(at + steps[event.key]);
      else return;
      event.preventDefault();
    });
    chart.addEventListener("blur", () => { leave(); at = -1; });
  }

  // A legend's button brings its series to the front: on the whole page, or in the section that it belongs to.
  for (const legend of all(".legend")) {
    const scope = legend.classList.contains("top") ? document : legend.closest("section");
    const buttons = all("button", legend);
    for (const button of buttons) {
      button.addEventListener("click", () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        for (const other of buttons) other.setAttribute("aria-pressed", String(on && other === button));
        for (const mark of all("section > svg [data-series]", document).filter((mark) => scope.contains(mark))) {
          mark.classList.toggle("dim", on && mark.dataset.series !== button.dataset.series);
        }
      });
    }
  }

  // A client that is chosen in one place is marked in all of them.
  const pick = (client) => {
    for (const mark of all("[data-client]")) mark.classList.toggle("picked", mark.dataset.client === client);
  };
  addEventListener("click", (event) => {
    const mark = event.target.closest && event.target.closest("main svg [data-client]");
    if (mark) pick(mark.dataset.client);
  });
  for (const form of all("form.find")) {
    const places = new Map(all("option", form).map((option) => [option.value, option.dataset.place]));
    const input = form.querySelector("input");
    const out = form.querySelector("output");
    const look = () => {
      const client = places.get(input.value.trim());
      pick(client === undefined ? "" : client);
      const mark = all("main svg .mark[data-client]").find((one) => one.dataset.client === client);
      out.textContent = mark ? words.get(mark).split("\n").slice(1).join("; ") : input.value ? "no such client" : "";
    };
    input.addEventListener("input", look);
    form.addEventListener("submit", (event) => { event.preventDefault(); look(); });
  }

  // Paper shows what is folded on a screen.
  const folded = all("details:not([open])");
  addEventListener("beforeprint", () => folded.forEach((entry) => { entry.open = true; }));
  addEventListener("afterprint", () => folded.forEach((entry) => { entry.open = false; }));

  for (const button of all("button.copy")) {
    button.addEventListener("click", async () => {
      const code = button.parentNode.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "copied";
      } catch {  // a page from a file may not: mark the text for the reader's own copy key
        getSelection().selectAllChildren(code);
        button.textContent = "selected";
      }
    });
  }
})();
