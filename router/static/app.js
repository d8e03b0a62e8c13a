// The page: chat on the left, the cluster on the right. Everything it shows of the cluster comes from one stream.

import { Chat } from "./chat.js";
import { showFigures, showState, Workers } from "./cluster.js";
import { watchCluster } from "./feed.js";
import { setUpTheme } from "./theme.js";
import { Timeline } from "./timeline.js";

const BURST = [
  "Name three rivers.", "What is a lighthouse for?", "Describe the colour blue.", "How do bees find flowers?",
  "Why is the sea salty?", "What does a conductor do?", "Give me a riddle.", "How is paper made?",
];

const by = (id) => document.getElementById(id);
const chat = new Chat();
const timeline = new Timeline();
const workers = new Workers();
let model = null;

setUpTheme(by("theme"), () => timeline.readColours());

watchCluster(
  (picture, clock) => {
    by("notice").hidden = true;
    model = picture.about?.model ?? model;
    chat.model = model;
    showFigures(picture);
    workers.show(picture.workers);
    timeline.show(picture, clock);
  },
  (isRefused) => {
    showState("lost");
    by("notice").hidden = false;
    by("notice").textContent = isRefused
      ? "The cluster is not shown at this address. Those who run it find it at the admin address."
      : "No connection to the server; trying again.";
  },
);

/** Eight short requests at the same time: enough to see a batch. Their answers are not shown. */
by("burst").addEventListener("click", async () => {
  by("burst").disabled = true;
  const key = by("key").value;
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const asked = BURST.map((content) =>
    fetch(new URL("v1/chat/completions", document.baseURI), {
      method: "POST",
      headers,
      body: JSON.stringify({ model: model ?? undefined, messages: [{ role: "user", content }], max_tokens: 64 }),
    }).then((response) => response.text()));
  await Promise.allSettled(asked);
  by("burst").disabled = false;
});
