// Shows what a model said to a choice. All drawing and all words come from Python: this sets
// attributes and texts, and nothing else.
"use strict";
const film = JSON.parse(document.getElementById("film").textContent);
const byId = (id) => document.getElementById(id);
const [texts, from, to, caption, task, tries, first, second, every, back] =
  ["texts", "from", "to", "caption", "task", "tries", "first", "second", "every", "back"].map(byId);
const [parts, heads] = [...document.querySelectorAll(".choice")].map((one) => [...one.querySelectorAll("button")]);
const cells = [...document.querySelectorAll("#view [data-name]")]
  .map((element) => [element, /^([kv])\.(\d+)\.(\d+)$/.exec(element.getAttribute("data-name"))])
  .filter(([, named]) => named)
  .map(([element, [, part, head, layer]]) => ({ element, part, head: Number(head), layer: Number(layer) }));
const whole = { part: "v", head: null, first: 0, last: film.layers - 1 };
const settle = 600;  // milliseconds that an end of the range rests before it counts as a try
let pair, now, before, tried, found, timer = null;

const say = (name, values = {}) => film.sentences[name].replace(/\{(\w+)\}/g, (_, key) => values[key]);
const written = (p) => (p ? (p / 100).toFixed(2) : "<0.01");
const key = (one) => [one.part, one.head, one.first, one.last].join();
const single = (one) => one.first === one.last;
const has = (one, cell) => cell.part === one.part && cell.layer >= one.first && cell.layer <= one.last &&
  (one.head === null || cell.head === one.head);

// Choices lie in the order of `tools.publish.facts.edits`: part, head (all first), first layer, last.
function answer(one) {
  const layers = film.layers, ranges = layers * (layers + 1) / 2;
  const group = (one.part === "v") * (film.heads + 1) + (one.head === null ? 0 : one.head + 1);
  const row = one.first * layers - one.first * (one.first - 1) / 2;
  return pair.answers[pair.edits[group * ranges + row + one.last - one.first]];
}
const flips = (one) => answer(one)[0] === pair.other[0];

function halves(one) {
  const middle = one.first + Math.floor((one.last - one.first + 1) / 2);
  return single(one) ? [] : [{ ...one, last: middle - 1 }, { ...one, first: middle }];
}

function draw(id, parts, said) {
  const box = byId(id), whose = (token) =>
    token === pair.own[0] ? "own" : token === pair.other[0] ? "others" : "";
  [...box.querySelectorAll("p > span, mark")].forEach((one, i) => { one.textContent = parts[i]; });
  const answer = box.querySelector("strong");
  answer.textContent = film.tokens[said[0]][1];
  answer.setAttribute("class", whose(said[0]));
  [...box.querySelectorAll("li")].forEach((row, i) => {
    const [token, p] = [said[2 * i], said[2 * i + 1]], bar = row.querySelector("rect");
    row.firstElementChild.textContent = film.tokens[token][1];
    row.lastElementChild.textContent = written(p);
    bar.style.width = `${p}px`;  // of the 100 of its viewBox
    bar.setAttribute("class", whose(token));
  });
}

// Which sentence says what to do next.
function next() {
  if (flips(now)) {
    if (single(now)) return now.head === null ? "found" : "found head";
    return halves(now).every((one) => tried.has(key(one)) && !flips(one)) ? "spread" : "halve";
  }
  const all = now.last - now.first + 1 === film.layers;
  if (now.part === "k") return "choose V";
  if (now.head !== null && (all || flips({ ...now, head: null }))) return "other head";
  if (single(now)) return "other layer";
  return all ? "more is less" : "other half";
}

function show() {
  const said = answer(now), heads_now = now.head === null ? film.heads : 1;
  const all = pair.tokens * film.heads * film.head_dim;  // K or V of a layer
  const values = {
    part: now.part.toUpperCase(), first: now.first, last: now.last, head: now.head,
    count: (all / film.heads * heads_now * (now.last - now.first + 1)).toLocaleString("en"),
    total: (2 * film.layers * all).toLocaleString("en"),
    answer: film.tokens[said[0]][1], p: written(said[1]),
    whose: say(flips(now) ? "of the other" : said[0] === pair.own[0] ? "as before" : "of neither"),
    tries: tried.size, found, halvings: film.halvings, best: film.halvings + 1,
  };
  values.layers = say(single(now) ? "layer" : now.last - now.first + 1 < film.layers ? "layers" : "all layers", values);
  values.heads = say(now.head === null ? "all heads" : "head", values);
  draw("after", pair.parts[0], said);
  caption.textContent = say("caption", values);
  task.textContent = timer === null ? say(next(), values) : "";
  tries.textContent = say("tries", values);
  from.value = now.first;
  to.value = now.last;
  for (const one of [from, to]) one.nextElementSibling.textContent = one.value;
  parts.forEach((one, i) => one.setAttribute("aria-pressed", String("kv"[i] === now.part)));
  heads.forEach((one, i) => one.setAttribute("aria-pressed", String((i ? i - 1 : null) === now.head)));
  for (const one of [first, second]) one.setAttribute("aria-disabled", String(single(now)));
  back.setAttribute("aria-disabled", String(!before.length));
  const settings = [...tried.values()];
  for (const cell of cells) {
    const times = settings.filter((one) => has(one, cell)).length;
    const look = has(now, cell) ? film.looks.now :
      times ? film.looks.tried[Math.min(times, film.looks.tried.length) - 1] : film.looks.free;
    for (const [name, value] of Object.entries(look)) cell.element.setAttribute(name, value);
  }
}

function count() {  // what is chosen now is a try
  clearTimeout(timer);
  timer = null;
  tried.set(key(now), now);
  if (found === null && single(now) && now.head === null && flips(now)) found = tried.size;
  show();
}

function go(wanted) {
  if (timer !== null) count();
  if (key(wanted) === key(now)) return;
  before.push(now);
  now = wanted;
  count();
}

function slide(wanted) {  // one move of an end of the range, however many layers it passes
  if (timer === null) before.push(now);
  clearTimeout(timer);
  timer = setTimeout(count, settle);
  now = wanted;
  show();
}

function begin() {
  clearTimeout(timer);
  timer = found = null;
  pair = film.pairs[texts.selectedIndex];
  [now, before, tried] = [whole, [], new Map()];
  draw("before", pair.parts[0], pair.own);
  draw("other", pair.parts[1], pair.other);
  count();
}

texts.addEventListener("change", begin);
first.addEventListener("click", () => single(now) || go(halves(now)[0]));
second.addEventListener("click", () => single(now) || go(halves(now)[1]));
every.addEventListener("click", () => go({ ...now, first: 0, last: film.layers - 1 }));
back.addEventListener("click", () => {
  if (timer !== null) count();
  if (!before.length) return;
  now = before.pop();
  show();
});
parts.forEach((one, i) => one.addEventListener("click", () => go({ ...now, part: "kv"[i] })));
heads.forEach((one, i) => one.addEventListener("click", () => go({ ...now, head: i ? i - 1 : null })));
from.addEventListener("input", () => {
  const at = Number(from.value);
  slide({ ...now, first: at, last: Math.max(at, now.last) });
});
to.addEventListener("input", () => {
  const at = Number(to.value);
  slide({ ...now, first: Math.min(at, now.first), last: at });
});
begin();
