// Keeps the page current: fetches it every two seconds and puts its parts in their places. What the
// server sends is escaped there; nothing is made of strings here. Without this script the page
// works all the same.
"use strict";

(() => {
  const EVERY = 2000; // between two looks [ms]
  const PATIENCE = 8000; // for one answer [ms]
  const form = document.getElementById("search");
  const input = document.getElementById("q");
  const live = document.getElementById("live");
  const main = document.getElementById("main");
  const refresh = document.getElementById("refresh");

  let timer = 0;
  let looking = null; // the AbortController of the look under way
  let lastGood = Date.now();
  let shown = location.pathname + location.search;

  function say(kind, words) {
    if (live.textContent === words) return; // or a screen reader would read it out again
    live.className = "state " + kind;
    live.textContent = words;
  }

  function since(when) {
    const seconds = Math.round((Date.now() - when) / 1000);
    return seconds < 60 ? seconds + " s" : Math.round(seconds / 60) + " min";
  }

  // The address of what the form asks for. The name of a task or a lock comes from our own address:
  // a field would lose what cannot be seen of it.
  function wanted() {
    const asked = new URLSearchParams(location.search);
    asked.delete("before");
    for (const key of ["q", "event", "since"]) {
      asked.set(key, form.elements[key].value.trim());
      if (!asked.get(key)) asked.delete(key);
    }
    return location.pathname + (String(asked) && "?" + asked);
  }

  // Somebody who is marking text in a part wants it to stay.
  function isMarked(part) {
    const marked = document.getSelection();
    return Boolean(marked && !marked.isCollapsed && marked.rangeCount && marked.getRangeAt(0).intersectsNode(part));
  }

  // The links of a part that lead where *link* does: rows come and go around them.
  function alike(part, link) {
    const href = link.getAttribute("href");
    return [...part.querySelectorAll("a, summary")].filter((it) => it.getAttribute("href") === href);
  }

  function replace(old, fresh) {
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    const place = focused && alike(old, focused).indexOf(focused);
    for (const it of old.querySelectorAll("details[open]")) {
      fresh.querySelector("#" + it.id)?.setAttribute("open", "");
    }
    old.replaceWith(fresh);
    if (focused) alike(fresh, focused)[place]?.focus({ preventScroll: true });
  }

  function show(text) {
    const fetched = new DOMParser().parseFromString(text, "text/html");
    const fresh = new Map([...fetched.querySelectorAll("[data-part]")].map((it) => [it.dataset.part, it]));
    if (!fresh.has("locks")) throw new Error("not our page");
    for (const old of main.querySelectorAll("[data-part]")) {
      const part = fresh.get(old.dataset.part);
      if (part && !isMarked(old)) replace(old, document.importNode(part, true));
    }
    main.classList.remove("stale");
  }

  async function look() {
    clearTimeout(timer);
    if (looking) looking.abort();
    const mine = new AbortController();
    looking = mine;
    const limit = setTimeout(() => mine.abort(), PATIENCE);
    try {
      // With the origin: it leaves out a token in the address, which fetch would not take.
      const answer = await fetch(location.origin + location.pathname + location.search, {
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
      main.classList.add("stale");
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
    const address = wanted();
    if (address === shown) return;
    shown = address;
    history.replaceState(null, "", address);
    refresh.setAttribute("href", address);
    look();
  }

  let typing = 0;
  form.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(search, 250);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(typing);
    search();
  });
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input, select, textarea");
    if (event.key !== "/" || isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    input.focus();
    input.select();
  });
  refresh.addEventListener("click", (event) => {
    event.preventDefault();
    look();
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? plan() : look()));

  say("good", "live");
  plan();
})();
