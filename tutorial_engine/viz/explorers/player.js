// Shows recorded steps. All drawing was done in Python: this sets attributes, and nothing else.
"use strict";
const film = JSON.parse(document.getElementById("film").textContent);
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
const make = (tag) => document.createElementNS(SVG, tag);
const [stage, all, view, caption, slider, told, play, speed] =
  ["stage", "all", "view", "caption", "slider", "told", "play", "speed"].map(byId);
const controls = [...document.querySelectorAll(".choice")].map((one) => [...one.querySelectorAll("button")]);
const card = film.card;
const narrow = matchMedia("(max-width: 720px)"), cuts = [];
let step = -1, last = 0, timer = null, rest = 0, run_shown = 0;

// A track is [[step, value], ...]: the value holds from its step on; null takes the attribute away.
const parts = film.items.map(({ tag, tracks, tip }) => {
  const element = make(tag);
  let words = null;
  if (tip) {
    const group = make("g"), over = make("g"), cover = make("rect");
    words = make("text");
    group.setAttribute("class", "te-hot");
    for (const [name, value] of Object.entries({ y: -15, width: 2000, height: 21, fill: "#ffffff" })) {
      cover.setAttribute(name, value);  // white below a tip, so that it can be read
    }
    over.setAttribute("class", "te-tip");
    over.append(cover, words);
    group.append(element, over);
    all.append(group);
    tip.over = over;
  } else {
    all.append(element);
  }
  return { element, words, tip, tracks: Object.entries(tracks), now: new Map() };
});

function at(track, wanted) {
  let low = 0, high = track.length;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (track[middle][0] <= wanted) low = middle; else high = middle;
  }
  return track[low][0] <= wanted ? track[low][1] : null;
}

function put(part, name, value) {
  if (part.now.get(name) === value) return;
  part.now.set(name, value);
  if (name === "words") part.element.textContent = value === null ? "" : value;
  else if (value === null) part.element.removeAttribute(name);
  else part.element.setAttribute(name, value);
}

function show(wanted) {
  slider.max = last = film.sizes[run_shown] - 1;
  step = Math.min(Math.max(wanted, 0), last);
  const now = film.sizes.slice(0, run_shown).reduce((sum, size) => sum + size, step);  // one behind the other
  for (const part of parts) {
    for (const [name, track] of part.tracks) put(part, name, at(track, now));
    if (part.tip) {
      const tip = at(part.tip.words, now);
      if (part.tip.shown === tip) continue;
      part.tip.shown = tip;
      part.words.textContent = tip || "";
      part.tip.over.setAttribute("transform", film.tip_at[Math.min(now, film.tip_at.length - 1)]);
      part.tip.over.setAttribute("visibility", tip ? "visible" : "hidden");
    }
  }
  stage.setAttribute("viewBox", card ? card.boxes[Number(innerWidth < 480)] : at(film.boxes, now));
  for (const [cut, boxes] of cuts) cut.setAttribute("viewBox", at(boxes, step));
  caption.textContent = film.captions[now];
  controls.reduceRight((way, options) => {  // the last control turns fastest
    options.forEach((one, i) => one.setAttribute("aria-pressed", String(i === way % options.length)));
    return Math.floor(way / options.length);
  }, run_shown);
  slider.value = step;
  slider.setAttribute("aria-valuetext", `${film.step_name} ${step} of ${last}`);
  told.textContent = `${film.step_name} ${step} of ${last}`;
}

// On a phone the parts of the picture stand below each other: windows onto the same items.
function stack() {
  const mine = film.parts[run_shown];
  const rows = card ? mine.slice(0, innerWidth < 480 ? card.rows : 0) : mine;
  if (cuts.length || !narrow.matches || !rows.length) return;
  for (const row of rows) {
    const line = document.createElement("div");
    line.className = "parts";
    for (const boxes of row) {
      const cut = make("svg"), use = make("use");
      use.setAttribute("href", "#all");
      cut.setAttribute("aria-hidden", "true");  // the caption says it
      cut.style.flex = `0 1 ${boxes[0][1].split(" ")[2]}px`;
      cut.append(use);
      line.append(cut);
      cuts.push([cut, boxes]);
    }
    view.append(line);
  }
  view.className = "stacked";
  show(step);
}

function unstack() {  // another run has its own parts
  for (const line of view.querySelectorAll(".parts")) line.remove();
  cuts.length = 0;
  view.className = "";
  stack();
}

function go(wanted) {
  show(wanted);
  if (!card) history.replaceState(null, "", `#t=${step}${run_shown ? `&v=${run_shown}` : ""}`);
}

function run(on) {
  clearInterval(timer);
  timer = on ? setInterval(tick, 1000 / (card ? card.speed : Number(speed.value))) : null;
  play.textContent = on ? "❚❚ Pause" : "▶ Play";
  play.setAttribute("aria-pressed", String(on));
  caption.setAttribute("aria-live", on ? "off" : "polite");  // a screen reader need not race
}

function tick() {
  if (step < last) return go(step + 1);
  if (!card) return run(false);
  rest = (rest + 1) % 4;  // the last picture stands for a while, then a card begins again
  if (!rest) go(0);
}

let wanted = !matchMedia("(prefers-reduced-motion: reduce)").matches;  // a card moves by itself
function toggle() {
  const on = wanted = timer === null;
  if (on && step >= last) go(0);
  run(on);
}

const keys = {
  ArrowLeft: () => go(step - 1), ArrowRight: () => go(step + 1),
  Home: () => go(0), End: () => go(last), " ": toggle,
};
document.addEventListener("keydown", (event) => {
  const act = keys[event.key], where = event.target.tagName;
  if (!act || event.ctrlKey || event.metaKey || event.altKey || where === "SELECT") return;
  if (event.key === " " && where === "BUTTON") return;  // the button takes it itself
  event.preventDefault();
  if (event.key !== " ") run(false);
  act();
});
for (const name of ["first", "back", "on", "end"]) {
  const key = { first: "Home", back: "ArrowLeft", on: "ArrowRight", end: "End" }[name];
  byId(name).addEventListener("click", () => { run(false); keys[key](); });
}
play.addEventListener("click", toggle);
slider.addEventListener("input", () => { run(false); go(Number(slider.value)); });
for (const button of controls.flat()) {
  button.addEventListener("click", () => {
    const pressed = (one) => one.getAttribute("aria-pressed") === "true";
    run_shown = controls.reduce((sum, all) =>
      sum * all.length + all.indexOf(all.includes(button) ? button : all.find(pressed)), 0);
    unstack();
    go(step);
  });
}
speed.addEventListener("change", () => { if (timer !== null) run(true); });
function fromAddress() {
  const [, wanted, run] = /^#t=(\d+)(?:&v=(\d+))?$/.exec(location.hash) || [0, film.start, 0];
  run_shown = Math.min(Number(run || 0), film.sizes.length - 1);
  return Number(wanted);
}
addEventListener("hashchange", () => { const to = fromAddress(); unstack(); show(to); });
narrow.addEventListener("change", stack);
show(fromAddress());
stack();
if (card) {
  document.body.className = "card";
  view.removeAttribute("tabindex");  // there is nothing to scroll
  new IntersectionObserver(([seen]) => run(seen.isIntersecting && wanted)).observe(view);
}
