// Light or dark: as the system says until the button is used. Not a module, so that it runs before the page is painted.
"use strict";
(() => {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const storage = (ask) => { // which the user may have forbidden
    try {
      return ask();
    } catch {
      return null;
    }
  };
  const kept = storage(() => localStorage.getItem("draftwood-theme"));
  if (kept) root.dataset.theme = kept;
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const tell = () => button.setAttribute("aria-pressed", dark());
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      storage(() => localStorage.setItem("draftwood-theme", root.dataset.theme));
      tell();
    });
    system.addEventListener("change", tell);
    tell();
  });
})();
