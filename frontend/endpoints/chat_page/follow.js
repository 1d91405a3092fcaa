// Keeps the end of the answer in sight, until the reader scrolls away.
import { at } from "/page/elements.js";

const NEAR_PX = 60;

let isFollowing = true;
let lastY = 0;

const isNear = (px) => scrollY + innerHeight >= document.documentElement.scrollHeight - px;
const isAtEnd = () => isNear(NEAR_PX);

function setFollowing(value) {
  isFollowing = value;
  at("to-end").hidden = value || isNear(innerHeight / 3);
}

export function followEnd() {
  setFollowing(true);
  scrollTo({ top: document.documentElement.scrollHeight, behavior: "instant" });
}

addEventListener("scroll", () => {
  const isUp = scrollY < lastY;
  lastY = scrollY;
  if (isAtEnd()) setFollowing(true);
  else if (isUp) setFollowing(false);
}, { passive: true });

new ResizeObserver(() => {
  if (isFollowing) followEnd();
  else setFollowing(false);
}).observe(at("messages"));

at("to-end").addEventListener("click", followEnd);
