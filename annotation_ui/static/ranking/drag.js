// Dragging with a mouse, a pen or a finger (pointer events): the browser's own drag and drop does not support touch.

// Lets `handle` be dragged, shown as `label`. `target(x, y)` returns the element under the pointer that accepts it, or
// null; `drop(element)` is called when it is released there.
export function makeDraggable(handle, label, target, drop) {
  handle.addEventListener("pointerdown", (down) => {
    if (down.button !== 0) return;
    down.preventDefault();
    handle.focus();
    const start = { x: down.clientX, y: down.clientY };
    let ghost = null;
    let over = null;
    let last = down;
    let frame = 0;

    const mark = (element) => {
      over?.classList.remove("over");
      over = element;
      over?.classList.add("over");
    };
    const follow = (move) => {
      if (!ghost && Math.hypot(move.clientX - start.x, move.clientY - start.y) < 4) return;
      if (!ghost) {
        ghost = document.body.appendChild(Object.assign(document.createElement("div"), { className: "drag-ghost" }));
        ghost.textContent = label;
        document.body.classList.add("is-dragging");
      }
      last = move;
      ghost.style.transform = `translate(${move.clientX + 10}px, ${move.clientY + 6}px)`;
      mark(target(move.clientX, move.clientY));
      frame ||= requestAnimationFrame(scroll);
    };
    const scroll = () => { // also while the pointer rests at an edge
      frame = scrollNearEdge(last) ? requestAnimationFrame(scroll) : 0;
      mark(target(last.clientX, last.clientY));
    };
    const end = (up) => {
      cancelAnimationFrame(frame);
      for (const [name, listener] of listeners) document.removeEventListener(name, listener);
      const landed = ghost && up.type === "pointerup" ? over : null;
      mark(null);
      ghost?.remove();
      document.body.classList.remove("is-dragging");
      if (landed) drop(landed);
    };
    const escape = (key) => key.key === "Escape" && end(key);
    const listeners = [["pointermove", follow], ["pointerup", end], ["pointercancel", end], ["keydown", escape]];
    for (const [name, listener] of listeners) document.addEventListener(name, listener);
  });
}

// Scrolls the scrollable elements under the pointer when it is near their edge; whether one moved.
function scrollNearEdge({ clientX, clientY }) {
  const edge = 40;
  let moved = false;
  for (let box = document.elementFromPoint(clientX, clientY); box; box = box.parentElement) {
    if (box.scrollHeight <= box.clientHeight || getComputedStyle(box).overflowY !== "auto") continue;
    const { top, bottom } = box.getBoundingClientRect();
    const before = box.scrollTop;
    if (clientY < top + edge) box.scrollBy(0, -6);
    else if (clientY > bottom - edge) box.scrollBy(0, 6);
    moved ||= box.scrollTop !== before;
  }
  return moved;
}
