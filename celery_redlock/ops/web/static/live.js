// Keeps the page current: fetches its parts every two seconds and puts them in their places.
// What the server sends is escaped there; nothing is made of strings here. Without this script
// the page works all the same.
"use strict";

(() => {
  const EVERY = 2000; // between two looks [ms]
  const PATIENCE = 8000; // for one answer [ms]
  const form = document.getElementById("search");
  const input = document.getElementById("q");
  const live = document.getElementById("live");
  const parts = document.getElementById("parts");
  const refresh = document.getElementById("refresh");

  let timer = 0;
  let looking = null; // the AbortController of the look under way
  let lastGood = Date.now();
  let shown = input.value;

  function say(kind, words) {
    if (live.textContent === words) return; // or a screen reader would read it out again
    live.className = "state " + kind;
    live.textContent = words;
  }

  function since(when) {
    const seconds = Math.round((Date.now() - when) / 1000);
    return seconds < 60 ? seconds + " s" : Math.round(seconds / 60) + " min";
  }

  function withSearch(address, search) {
    return search ? address + "?" + new URLSearchParams({ q: search }) : address;
  }

  // Somebody who is marking text in a part wants it to stay.
  function isMarked(part) {
    const marked = document.getSelection();
    return Boolean(marked && !marked.isCollapsed && marked.rangeCount && marked.getRangeAt(0).intersectsNode(part));
  }

  function focusIn(part) {
    const focused = document.activeElement;
    if (!focused || !part.contains(focused)) return () => {};
    const { id } = focused;
    const { key } = focused.dataset;
    return () => {
      const again = id
        ? document.getElementById(id)
        : [...part.querySelectorAll("[data-key]")].find((it) => it.dataset.key === key);
      if (again) again.focus({ preventScroll: true });
    };
  }

  function replace(old, fresh) {
    const focusAgain = focusIn(old);
    const scrolled = [...old.querySelectorAll(".scroll[id]")].map((it) => [it.id, it.scrollLeft, it.scrollTop]);
    old.replaceChildren(...fresh.childNodes);
    for (const name of old.getAttributeNames()) old.removeAttribute(name);
    for (const name of fresh.getAttributeNames()) old.setAttribute(name, fresh.getAttribute(name));
    for (const [id, left, top] of scrolled) {
      const it = document.getElementById(id);
      if (it) it.scrollTo(left, top);
    }
    focusAgain();
  }

  function show(text) {
    const fetched = new DOMParser().parseFromString(text, "text/html");
    const fresh = new Map([...fetched.querySelectorAll("[data-part]")].map((it) => [it.dataset.part, it]));
    if (!fresh.has("locks")) throw new Error("not our page");
    for (const old of parts.querySelectorAll("[data-part]")) {
      const part = fresh.get(old.dataset.part);
      if (part && !isMarked(old)) replace(old, document.importNode(part, true));
    }
    parts.classList.remove("stale");
  }

  async function look() {
    clearTimeout(timer);
    if (looking) looking.abort();
    const mine = new AbortController();
    looking = mine;
    const limit = setTimeout(() => mine.abort(), PATIENCE);
    const search = input.value.trim();
    try {
      const answer = await fetch(withSearch(form.dataset.fragment, search), {
        cache: "no-store",
        signal: mine.signal,
      });
      if (!answer.ok) throw new Error(String(answer.status));
      const text = await answer.text();
      if (looking !== mine) return;
      show(text);
      lastGood = Date.now();
      say("good", "live");
    } catch {
      if (looking !== mine) return;
      say("bad", "no answer for " + since(lastGood) + ", this is old");
      parts.classList.add("stale");
    } finally {
      clearTimeout(limit);
      if (looking === mine) {
        looking = null;
        plan();
      }
    }
  }

  function plan() {
    clearTimeout(timer);
    if (document.hidden) {
      say("plain", "paused");
    } else {
      timer = setTimeout(look, EVERY);
    }
  }

  function search() {
    const wanted = input.value.trim();
    if (wanted === shown) return;
    shown = wanted;
    const address = withSearch(form.getAttribute("action"), wanted);
    history.replaceState(null, "", address);
    refresh.setAttribute("href", address);
    look();
  }

  let typing = 0;
  input.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(search, 250);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(typing);
    search();
  });
  refresh.addEventListener("click", (event) => {
    event.preventDefault();
    look();
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? plan() : look()));

  form.classList.add("scripted");
  say("good", "live");
  plan();
})();
