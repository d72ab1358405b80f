// Paper is white: print in the light theme, then return to the reader's own.
let themeOnScreen;
window.addEventListener("beforeprint", () => {
  themeOnScreen = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
});
window.addEventListener("afterprint", () => {
  document.documentElement.dataset.theme = themeOnScreen;
});
