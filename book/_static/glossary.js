// Definitions of terms show by the style sheet alone. Escape hides them until a pointer or the focus comes to a link again.
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  for (const definition of document.querySelectorAll(".nqf-definition")) definition.hidden = true;
});
for (const arrival of ["mouseover", "focusin"]) {
  document.addEventListener(arrival, (event) => {
    const term = event.target.closest?.(".nqf-term");
    if (term) term.nextElementSibling.hidden = false;
  });
}
