#!/usr/bin/env python3
"""Asks a running retrievald two questions about one document, streams the answers and says what each cost. Standard library only."""

import argparse
import http.client
import json
import os
import sys
import time

# Questions that a model of 135 million parameters answers from the text.
QUESTIONS = (
    "From which country did Ruth come?",
    "Which city did God tell Jonah to go to?",
)


class Failure(Exception):
    pass


class Progress:
    """One line that is rewritten on a terminal; elsewhere a line now and then."""

    def __init__(self):
        self.terminal = sys.stderr.isatty()
        self.last = time.monotonic()
        self.text = ""

    def show(self, text):
        now = time.monotonic()
        if text == self.text or now - self.last < (0.1 if self.terminal else 5):
            return
        self.last, self.text = now, text
        print(f"\r\033[K{text}" if self.terminal else text, end="" if self.terminal else "\n", file=sys.stderr, flush=True)

    def clear(self):
        if self.terminal and self.text:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        self.text = ""


def alive(pid):
    if pid is None:
        return True
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def get(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def wait_for(args, what, remaining, seconds):
    """Polls until remaining() gives 0; it may raise OSError while the daemon is not up yet."""
    progress, start, count = Progress(), time.monotonic(), None
    while True:
        try:
            count = remaining()
            if count == 0:
                progress.clear()
                return
        except (OSError, http.client.HTTPException, ValueError):
            pass
        waited = time.monotonic() - start
        if not alive(args.pid):
            progress.clear()
            raise Failure("the daemon has ended")
        if waited > seconds:
            progress.clear()
            raise Failure(f"gave up after {seconds} s: {what}")
        progress.show(f"{what}, {waited:.0f} s" + (f": {count} to go" if count else ""))
        time.sleep(0.05)


def events(response):
    for line in response:
        line = line.strip()
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[6:])


def ask(port, document, question, attention):
    """Streams one answer. Returns its text, usage, timings and the time to the first piece of text."""
    body = {
        "messages": [{"role": "user", "content": f"{document}\n\n{question}"}],
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_progress": True,
    }
    if attention:
        body["attention"] = {"mode": attention}
    progress, text, usage, timings, first = Progress(), "", {}, {}, None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    start = time.monotonic()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise Failure(f"HTTP {response.status}: {response.read(2000).decode(errors='replace')}")
    for event in events(response):
        if "error" in event:
            raise Failure(event["error"].get("message", "error"))
        state = event.get("prompt_progress")
        if state and state.get("total"):
            progress.show(f"reading: {state['processed']} of {state['total']} tokens ({100 * state['processed'] // state['total']}%)")
        usage = event.get("usage") or usage
        timings = event.get("timings") or timings
        for choice in event.get("choices", ()):
            piece = (choice.get("delta") or {}).get("content")
            if piece:
                if first is None:
                    first = time.monotonic() - start
                    progress.clear()
                print(piece, end="", flush=True)
                text += piece
    connection.close()
    print()
    return text, usage, timings, first


def report(usage, timings, first):
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    per_token = timings.get("predicted_ms", 0) / max(1, timings.get("predicted_n", 0))
    print(
        f"  [{usage.get('prompt_tokens', 0)} prompt tokens, {cached} cached; first token {first or 0:.2f} s; {per_token:.1f} ms a token; "
        f"keys attended {timings.get('keys_attended', 0):.0f} of {timings.get('keys_held', 0):.0f}]\n"
    )
    return cached


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--pid", type=int, help="the daemon's process: stop waiting when it has ended")
    parser.add_argument("--document", required=True)
    parser.add_argument("--check", action="store_true", help="fail unless the second answer came from the kept context, through the graph")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # in a log, in order with the progress on standard error
    with open(args.document, encoding="utf-8") as f:
        document = f.read().rstrip("\n")

    wait_for(args, "loading the model", lambda: 0 if get(args.port, "/health")[0] == 200 else None, 300)
    print(f"The document: {args.document}, {len(document.encode())} bytes\n")
    failures = []
    for i, question in enumerate(QUESTIONS):
        if i == 1:
            # At this length a scan would do as well; the demonstration asks for the graph, so it must be there. It is built from queries of
            # the first question's prefill, which are kept where the request may need them.
            wait_for(args, "building the index", lambda: get(args.port, "/props")[1].get("index_pending"), 600)
        print(f"Question: {question}\nAnswer: ", end="", flush=True)
        text, usage, timings, first = ask(args.port, document, question, "graph")
        cached = report(usage, timings, first)
        if not text.strip():
            failures.append(f"answer {i + 1} is empty")
        if i == 1 and cached * 2 < usage.get("prompt_tokens", 1):
            failures.append(f"the second question was not served from the context: {cached} tokens cached")
        if i == 1 and not timings.get("n_graph"):
            failures.append("the second answer's keys were not found through the graph")
    for failure in failures if args.check else ():
        print(f"check failed: {failure}", file=sys.stderr)
    return 1 if args.check and failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Failure, OSError, http.client.HTTPException, ValueError) as e:
        print(f"\nask.py: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
