// Light, dark, or as the system has it.

const ORDER = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");

export function setUpTheme(button, onChange) {
  let choice = read();

  function show() {
    if (choice === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = choice;
    button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[choice];
    button.setAttribute("aria-label", `Colour scheme: ${choice === "auto" ? "automatic" : choice}`);
    onChange();
  }

  button.addEventListener("click", () => {
    choice = ORDER[(ORDER.indexOf(choice) + 1) % ORDER.length];
    try {
      localStorage.setItem("baton-theme", choice);
    } catch {
      // storage is off: the choice lasts as long as the page
    }
    show();
  });
  system.addEventListener("change", show);
  show();
}

function read() {
  try {
    const kept = localStorage.getItem("baton-theme");
    return ORDER.includes(kept) ? kept : "auto";
  } catch {
    return "auto";
  }
}
