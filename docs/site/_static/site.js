// What is wider than its place is moved sideways; whoever has no mouse must reach it with Tab.
"use strict";
function reach() {
  for (const box of document.querySelectorAll("pre, .strip, .table-wrapper, .text_html")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}
// On a narrow screen sentences wrap; columns and code keep their lines, and are moved sideways.
for (const text of document.querySelectorAll(".output pre")) {
  if (/\S {3,}\S|^ {4,}\S/m.test(text.textContent)) text.style.whiteSpace = "pre";
}
// The theme has two asides, and gives a screen reader no name for either.
document.querySelector(".sidebar-drawer")?.setAttribute("aria-label", "site");
document.querySelector(".toc-drawer")?.setAttribute("aria-label", "this page");
addEventListener("load", reach);
addEventListener("resize", reach);

// A question: the first choice counts. It is marked, and the answer below it opens.
let right = 0, made = 0;
function choose(ask, button) {
  if (ask.dataset.chosen) return;
  ask.dataset.chosen = "1";
  const good = "right" in button.dataset;
  for (const one of ask.querySelectorAll("button")) {
    one.setAttribute("aria-disabled", "true");
    one.setAttribute("aria-pressed", String(one === button));
    if ("right" in one.dataset) one.append(" ✔");
    else if (one === button) one.append(" ✘");
  }
  const said = ask.querySelector(".ask-said");
  said.textContent = good ? "As you predicted." : "Read the answer to see why.";
  ask.querySelector("details").open = true;
  made += 1;
  right += good;
  const score = document.getElementById("score");
  if (score) score.textContent = `${right} of ${made} right; ${count - made} to go.`;
}
const asks = document.querySelectorAll(".ask"), count = asks.length;
for (const ask of asks) {
  const said = document.createElement("p");
  said.className = "ask-said";
  said.setAttribute("role", "status");
  ask.querySelector(".ask-options").after(said);
  for (const button of ask.querySelectorAll("button")) {
    button.addEventListener("click", () => choose(ask, button));
  }
}

for (const cell of document.querySelectorAll(".cell_input")) {
  const button = document.createElement("button");
  button.className = "copy";
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy this code");
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(cell.querySelector("pre").innerText.trimEnd() + "\n");
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  cell.append(button);
}
