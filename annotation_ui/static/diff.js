// The difference between two texts, word by word.

import { h } from "./dom.js";

const MOST = 4_000_000; // cells of the table of common words; beyond, the differing middle is shown as replaced
const words = (text) => text.match(/\s+|[\p{L}\p{N}\p{M}_'’]+|[^\s]/gu) ?? [];

// [[kind, text]] with the kinds "same", "removed" and "added"; the texts without "added" are the old one, without "removed" the new.
export function difference(before, after) {
  const [old, now] = [words(before), words(after)];
  let start = 0;
  while (start < old.length && start < now.length && old[start] === now[start]) start += 1;
  let end = 0;
  while (end < old.length - start && end < now.length - start && old.at(-1 - end) === now.at(-1 - end)) end += 1;
  const parts = [];
  const add = (kind, text) => {
    if (!text) return;
    if (parts.at(-1)?.[0] === kind) parts.at(-1)[1] += text;
    else parts.push([kind, text]);
  };
  add("same", old.slice(0, start).join(""));
  for (const [kind, text] of middle(old.slice(start, old.length - end), now.slice(start, now.length - end))) add(kind, text);
  add("same", old.slice(old.length - end).join(""));
  return parts;
}

// The longest common subsequence of two lists of words, by dynamic programming from the end.
function middle(old, now) {
  if (old.length * now.length > MOST) return [["removed", old.join("")], ["added", now.join("")]];
  const width = now.length + 1;
  const common = new Uint32Array((old.length + 1) * width);
  for (let i = old.length - 1; i >= 0; i -= 1) {
    for (let j = now.length - 1; j >= 0; j -= 1) {
      common[i * width + j] = old[i] === now[j] ? common[(i + 1) * width + j + 1] + 1
        : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  const parts = [];
  let [i, j] = [0, 0];
  while (i < old.length || j < now.length) {
    if (i < old.length && j < now.length && old[i] === now[j]) parts.push(["same", old[i++], j++]);
    else if (j === now.length || (i < old.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) parts.push(["removed", old[i++]]);
    else parts.push(["added", now[j++]]);
  }
  return parts;
}

// The difference as an element; what was removed is struck through, what was added underlined.
export function differenceView(label) {
  const element = h("div", { class: "difference", role: "group", "aria-label": label, dir: "auto" });
  let shown = null;
  return { element, show(before, after) {
    if (shown?.before === before && shown.after === after) return;
    shown = { before, after };
    const tags = { removed: "del", added: "ins" };
    element.replaceChildren(...difference(before, after).map(([kind, text]) => (tags[kind] ? h(tags[kind], {}, text) : text)));
  } };
}
