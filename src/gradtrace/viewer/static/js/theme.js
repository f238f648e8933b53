// Light or dark: what the visitor chose, else what the system says.

const system = matchMedia("(prefers-color-scheme: dark)");

function stored() {
  try {
    return localStorage.getItem("gradtrace-theme");
  } catch {
    return null; // a sandboxed frame has no storage
  }
}

export function applyTheme(onChange) {
  const apply = () => {
    document.documentElement.dataset.theme = stored() ?? (system.matches ? "dark" : "light");
    onChange();
  };
  apply();
  system.addEventListener("change", apply);
}

export function flipTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("gradtrace-theme", theme);
  } catch {
    // it then lasts until the page is closed
  }
}
