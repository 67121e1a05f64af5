// What is wider than its place is moved sideways; whoever has no mouse must reach it with Tab.
"use strict";
function reach() {
  for (const box of document.querySelectorAll("pre, .strip, .table-wrapper")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}
addEventListener("load", reach);
addEventListener("resize", reach);
