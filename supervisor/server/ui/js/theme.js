// Runs before the first paint, so that a chosen theme doesn't flash the other one. No choice: the system's.
{
  const chosen = localStorage.getItem("llmux.theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
}
