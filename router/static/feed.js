// The stream of pictures: one EventSource, taken up again when it breaks.

import { applyPart, emptyPicture, FORMAT, restarted } from "./picture.js";

const RETRY_MS = 2000; // after a refusal; doubled with each further one
const MAX_RETRY_MS = 60000;

/** Calls `onPicture(picture, clock)` after each event and `onTrouble(isRefused)` when there is no stream.
 *  `clock()` is the router's time now: of all events so far, the one that took least to come sets it. */
export function watchCluster(onPicture, onTrouble) {
  let picture = emptyPicture();
  let offset = -Infinity; // router's time minus ours, in seconds
  let source = null;
  let retryMs = RETRY_MS;
  const local = () => performance.now() / 1000;
  const clock = () => local() + offset;

  function open() {
    let isFirst = true;
    source = new EventSource(new URL("page/events", document.baseURI));
    source.onmessage = (event) => {
      const part = JSON.parse(event.data);
      if (isFirst) {
        picture = restarted(picture);
        offset = -Infinity; // it may be another router
        isFirst = false;
        retryMs = RETRY_MS;
      }
      if (part.about && part.about.format !== FORMAT) {
        location.reload();
        return;
      }
      offset = Math.max(offset, part.now - local());
      picture = applyPart(picture, part);
      onPicture(picture, clock);
    };
    source.onerror = () => {
      const isRefused = source.readyState === EventSource.CLOSED; // an answer that is no stream
      onTrouble(isRefused);
      isFirst = true;
      if (isRefused) {
        setTimeout(open, retryMs);
        retryMs = Math.min(MAX_RETRY_MS, 2 * retryMs);
      }
    };
  }

  open();
}
