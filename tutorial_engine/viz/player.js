// Shows recorded steps. All drawing was done in Python: this sets attributes, and nothing else.
"use strict";
const film = JSON.parse(document.getElementById("film").textContent);
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);
const [stage, view, caption, slider, told, play, speed] =
  ["stage", "view", "caption", "slider", "told", "play", "speed"].map(byId);
const last = film.captions.length - 1;
const card = new URLSearchParams(location.search).has("card") ? film.card : undefined;
let step = -1, timer = null, rest = 0;

// A track is [[step, value], ...]: the value holds from its step on; null takes the attribute away.
const parts = film.items.map(({ tag, tracks, tip }) => {
  const element = document.createElementNS(SVG, tag);
  let words = null;
  if (tip) {
    const group = document.createElementNS(SVG, "g");
    group.setAttribute("class", "te-hot");
    words = document.createElementNS(SVG, "text");
    const over = document.createElementNS(SVG, "g");
    const cover = document.createElementNS(SVG, "use");
    cover.setAttribute("href", "#te-cover");
    over.setAttribute("class", "te-tip");
    over.append(cover, words);
    group.append(element, over);
    stage.append(group);
    tip.over = over;
  } else {
    stage.append(element);
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
  step = Math.min(Math.max(wanted, 0), last);
  for (const part of parts) {
    for (const [name, track] of part.tracks) put(part, name, at(track, step));
    if (part.tip) {
      const tip = at(part.tip.words, step);
      if (part.tip.shown === tip) continue;
      part.tip.shown = tip;
      part.words.textContent = tip || "";
      part.tip.over.setAttribute("transform", film.tip_at[Math.min(step, film.tip_at.length - 1)]);
      part.tip.over.setAttribute("visibility", tip ? "visible" : "hidden");
    }
  }
  stage.setAttribute("viewBox", card ? card.boxes[Number(innerWidth < 480)] : at(film.boxes, step));
  caption.textContent = film.captions[step];
  slider.value = step;
  slider.setAttribute("aria-valuetext", `${film.step_name} ${step} of ${last}`);
  told.textContent = `${film.step_name} ${step} of ${last}`;
}

// On a phone the picture is wider than its window: bring most of what this step changed into view.
function follow() {
  const room = view.clientWidth;
  if (card || stage.clientWidth <= room) return;
  const left = stage.getBoundingClientRect().left;
  const changed = step === 0 ? [] : parts
    .filter(({ tracks }) => tracks.some(([, track]) => track.some(([since]) => since === step)))
    .map(({ element }) => element.getBoundingClientRect())
    .filter((box) => box.width > 0 && box.width < room)
    .map((box) => [box.left - left, box.right - left]);
  const seen = (from) => changed.filter(([a, b]) => a >= from && b <= from + room).length;
  let best = step === 0 ? 0 : view.scrollLeft;
  for (const [a] of changed) if (seen(a - 8) > seen(best)) best = a - 8;
  view.scrollTo({ left: best, behavior: "auto" });
}

function go(wanted) {
  show(wanted);
  follow();
  if (!card) history.replaceState(null, "", `#t=${step}`);
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
speed.addEventListener("change", () => { if (timer !== null) run(true); });
const fromAddress = () => Number((/^#t=(\d+)$/.exec(location.hash) || [0, film.start])[1]);
addEventListener("hashchange", () => { show(fromAddress()); follow(); });
slider.max = last;
show(fromAddress());
follow();
if (card) {
  document.body.className = "card";
  view.removeAttribute("tabindex");  // there is nothing to scroll
  new IntersectionObserver(([seen]) => run(seen.isIntersecting && wanted)).observe(stage);
}
