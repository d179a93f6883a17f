"""Renders chat templates for retrievald (server/template.c starts it; see template.h).

A template is a stranger's code, and a request is a stranger's data. This process, the parent, touches neither: for every message on its control
socket (fd 3) it forks a child, hands it the socket that came along and forgets both. The child locks itself in (limits, no other file descriptor,
a seccomp filter) and only then reads the template and the request.

Control socket (SOCK_SEQPACKET): the first message from the server is the children's seccomp program, the answer "ok" or why not;
every later message carries one connected stream socket.
A child's socket, to the child: HEADER, n_strings times (u32 length, bytes), the request's JSON.
Back: one byte when the child is there, then REPLY (0 or a negative errno, 0, length) and the text, or the error's.
The strings: compiled code or nothing, template, bos, eos (length ABSENT: there is none), control tokens' texts.
"""

import ctypes
import errno
import gc
import importlib.util
import json
import marshal
import math
import os
import pprint  # noqa: F401  jinja2 imports these two when a template first uses them: too late for a child without files
import re
import resource
import signal
import socket
import struct
import sys
import textwrap  # noqa: F401
import time
from datetime import datetime

CONTROL = 3

try:
    import jinja2
    import jinja2.constants
    import jinja2.debug
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as missing:
    socket.socket(fileno=CONTROL).send(f"{missing} (Debian: python3-jinja2)".encode())
    sys.exit(1)

HEADER = struct.Struct("=IIIIQQQQ")  # operation, n_strings, CPU and wall seconds, memory, bytes of strings, of JSON, most bytes back
REPLY = struct.Struct("=iIQ")
COMPILE, RENDER = 1, 2
ABSENT = 0xFFFFFFFF
NOBODY = 65534

# Two noncharacters of Unicode, which no text for interchange holds.
GUARD = "\ufdd0\ufdd1"
FORGED = re.compile("\ufdd0+(?=\ufdd1)")
MAX_DEPTH = 64
MAX_ERROR = 400

# Compiled code is only good for the interpreter and the jinja2 that made it.
MAGIC = importlib.util.MAGIC_NUMBER + jinja2.__version__.encode() + b"\0"

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 4, 22, 38, 2
prctl = ctypes.CDLL(None, use_errno=True).prctl
prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


class BadRequest(Exception):
    """The request is at fault; the text says how."""


# Rendering, as transformers does it


class Generation(jinja2.ext.Extension):
    """{% generation %}: marks what the assistant said, for training. Here it prints its body."""

    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return env


ENV = environment()


def compile_template(source):
    return MAGIC + marshal.dumps(ENV.compile(source.decode("utf-8")))


def load_template(code, source):
    if not code.startswith(MAGIC):
        code = compile_template(source)
    return jinja2.Template.from_code(ENV, marshal.loads(code[len(MAGIC) :]), ENV.make_globals(None))


def run_template(template, variables, most):
    """The prompt's bytes. A template that prints without end stops at `most`."""
    pieces, n = [], 0
    for piece in template.generate(variables):
        n += len(piece)
        if n > most:
            raise MemoryError
        pieces.append(piece)
    text = "".join(pieces)
    del pieces
    try:
        return text.encode()
    except UnicodeEncodeError:  # halves of surrogate pairs, which JSON can spell
        return re.sub("[\ud800-\udfff]", "\ufffd", text).encode()


# What a request says


def parse_json(raw):
    def constant(name):
        raise BadRequest(f"{name} is not a JSON number")

    def real(text):
        value = float(text)
        if not math.isfinite(value):
            raise BadRequest(f"the number {text[:40]} is out of range")
        return value

    try:
        return json.loads(raw.decode("utf-8"), parse_constant=constant, parse_float=real)
    except UnicodeDecodeError as e:
        raise BadRequest(f"the request is not UTF-8 at byte {e.start}") from None
    except RecursionError:
        raise BadRequest("the request is nested too deep") from None
    except ValueError as e:
        raise BadRequest(f"the request is not JSON: {e}") from None


class Cleaner:
    """Breaks control tokens inside a request's strings with the guard, so that they stay text."""

    def __init__(self, controls):
        # By first three characters, for which str.find() looks quickly. A token of a single character cannot be broken.
        self.stems = {}
        for text in controls:
            if len(text) > 1:
                self.stems.setdefault(text[:3], []).append(text)
        self.stems = {stem: tuple(texts) for stem, texts in self.stems.items()}

    def string(self, text):
        if GUARD in text:
            text = FORGED.sub("", text)
        cuts = set()
        for stem, texts in self.stems.items():
            at = text.find(stem)
            while at >= 0:
                if text.startswith(texts, at):
                    cuts.add(at + 1)
                at = text.find(stem, at + 1)
        if not cuts:
            return text
        cuts = sorted(cuts)
        return GUARD.join(text[a:b] for a, b in zip([0] + cuts, cuts + [len(text)]))

    def value(self, v, depth=0):
        if isinstance(v, str):
            return self.string(v)
        if depth > MAX_DEPTH:
            raise BadRequest(f"the request is nested deeper than {MAX_DEPTH} levels")
        if isinstance(v, list):
            return [self.value(x, depth + 1) for x in v]
        if isinstance(v, dict):
            return {self.string(k): self.value(x, depth + 1) for k, x in v.items()}
        return v


def join_parts(parts, where):
    texts = []
    for i, part in enumerate(parts):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise BadRequest(f"{where}[{i}] is not an object with a type")
        if part["type"] != "text":
            raise BadRequest(f"{where}[{i}]: parts of type {part['type'][:40]!r} are not supported, only text")
        if not isinstance(part.get("text"), str):
            raise BadRequest(f"{where}[{i}].text is not a string")
        texts.append(part["text"])
    return "\n".join(texts)


def openai_content(message, where, source):
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return join_parts(content, where + ".content")
    if content is not None:
        raise BadRequest(f"{where}.content is not a string, a list of parts or null")
    if "content" not in message and not message.get("tool_calls"):
        raise BadRequest(f"{where}.content is missing")
    # Some templates (DeepSeek's) know a tool call by its null content; most would print "None", or fail to join it to a string.
    if message.get("tool_calls") and re.search(r"content['\"\]]*\s+is\s+(not\s+)?none", source):
        return None
    return ""


def openai_tool_call(call, where):
    if not isinstance(call, dict):
        raise BadRequest(f"{where} is not an object")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse_json(function["arguments"].encode())
    except (BadRequest, UnicodeEncodeError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def openai_messages(messages, source):
    """OpenAI's shapes to those that templates expect."""
    if not isinstance(messages, list):
        raise BadRequest("messages is not a list" if messages is not None else "messages is missing")
    if not messages:
        raise BadRequest("messages is empty")
    result = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise BadRequest(f"{where} is not an object")
        if not isinstance(message.get("role"), str):
            raise BadRequest(f"{where}.role is not a string" if "role" in message else f"{where}.role is missing")
        message = {**message, "content": openai_content(message, where, source)}
        if message["role"] == "developer" and "developer" not in source:
            message["role"] = "system"
        calls = message.get("tool_calls")
        if calls is None:
            message.pop("tool_calls", None)
        elif not isinstance(calls, list):
            raise BadRequest(f"{where}.tool_calls is not a list")
        else:
            message["tool_calls"] = [openai_tool_call(c, f"{where}.tool_calls[{k}]") for k, c in enumerate(calls)]
        result.append(message)
    return result


def expect(request, key, kind, default, name):
    value = request.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise BadRequest(f"{key} is not {name}")
    return value


def variables(request, source, bos, eos, cleaner):
    if not isinstance(request, dict):
        raise BadRequest("the request is not an object")
    messages, tools = request.get("messages"), expect(request, "tools", list, None, "a list")
    if expect(request, "openai", bool, True, "true or false"):
        messages = openai_messages(messages, source)
        tools = tools or None
    result = dict(cleaner.value(expect(request, "chat_template_kwargs", dict, {}, "an object")))
    result["messages"] = cleaner.value(messages)
    result["tools"] = cleaner.value(tools)
    result["documents"] = cleaner.value(expect(request, "documents", list, None, "a list"))
    result["add_generation_prompt"] = expect(request, "add_generation_prompt", bool, True, "true or false")
    for name, text in (("bos_token", bos), ("eos_token", eos)):
        if text is not None:
            result[name] = text
    return result


# A child


def line_of(error):
    """The template's line that an error came from, as text to append."""
    line, tb = 0, error.__traceback__
    while tb:
        if tb.tb_frame.f_code.co_filename == "<template>":
            line = tb.tb_lineno
        tb = tb.tb_next
    return f" (chat template, line {line})" if line else ""


def serve(operation, strings, raw, most):
    """What goes back: 0 or a negative errno, and bytes."""
    code, source, bos, eos = strings[:4]
    try:
        text = source.decode("utf-8")
        if operation == COMPILE:
            return 0, compile_template(source)
        bos, eos = (s if s is None else s.decode("utf-8", "replace") for s in (bos, eos))
        cleaner = Cleaner(s.decode("utf-8", "replace") for s in strings[4:])
        request = parse_json(raw)
        values = variables(request, text, bos, eos, cleaner)
        del raw, request
        prompt = run_template(load_template(code, source), values, most)
        if len(prompt) > most:
            raise MemoryError
        return 0, prompt
    except MemoryError:
        status, message = errno.ENOMEM, "the chat template needs more memory, or prints more, than it may"
    except UnicodeDecodeError as e:
        status, message = errno.EINVAL, f"chat_template is not UTF-8 at byte {e.start}"
    except BadRequest as e:
        status, message = errno.EINVAL, str(e)
    except RecursionError:
        status, message = errno.EINVAL, "the chat template is nested too deep"
    except jinja2.TemplateSyntaxError as e:
        status, message = errno.EINVAL, f"chat_template, line {e.lineno}: {e.message}"
    except Exception as e:
        own = type(e) is jinja2.exceptions.TemplateError  # raise_exception: the template's own words
        kind = "" if isinstance(e, jinja2.TemplateError) else type(e).__name__ + ": "
        status, message = errno.EINVAL, kind + str(e) + ("" if own else line_of(e))
    return -status, message[:MAX_ERROR].encode("utf-8", "replace")


def lock_in(filter_program, base, cpu_seconds, wall_seconds, memory):
    """From here on this process has its memory, a clock and one socket, and not for long."""
    limits = {
        resource.RLIMIT_AS: base + memory,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)

    class Program(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    program = Program(len(filter_program) // 8, filter_program)
    if prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp: " + os.strerror(ctypes.get_errno()))


def send_all(fd, data):
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def child(fd, filter_program, base):
    """Never returns."""
    try:
        os.closerange(0, fd)
        os.closerange(fd + 1, 4096)
        os.write(fd, b"!")
        stream = open(fd, "rb", closefd=False)
        operation, n_strings, cpu_seconds, wall_seconds, memory, n_bytes, n_json, most = HEADER.unpack(stream.read(HEADER.size))
        try:
            lock_in(filter_program, base, cpu_seconds, wall_seconds, memory)
            data = stream.read(n_bytes)
            raw = stream.read(n_json)
            if len(data) != n_bytes or len(raw) != n_json:
                os._exit(1)
            strings, at = [], 0
            for _ in range(n_strings):
                (n,) = struct.unpack_from("=I", data, at)
                at += 4
                strings.append(None if n == ABSENT else data[at : at + n])
                at += 0 if n == ABSENT else n
            status, reply = serve(operation, strings, raw, most)
        except MemoryError:
            status, reply = -errno.ENOMEM, b"the request needs more memory than it may"
        except OSError as e:
            status, reply = -errno.EIO, f"the template helper cannot confine itself: {e}".encode()
        send_all(fd, REPLY.pack(status, 0, len(reply)))
        send_all(fd, reply)
        os._exit(0)
    finally:
        os._exit(1)


# The parent


def drop_privileges():
    os.chdir("/")
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        except OSError:
            pass  # a container without that user: the children's seccomp filter holds all the same
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def warm_up():
    """What Python and jinja2 set up on first use, while there are still files to load it from."""
    source = b"{% for m in messages %}{% generation %}{{ m.content | trim | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%c') }}{{ a.b }}"
    request = b'{"messages": [{"role": "user", "content": "<a> 1.5"}], "tools": [1.5, 1]}'
    strings = [b"", source, b"", b"", b"<a>"]
    strings[0] = serve(COMPILE, strings, b"", 1)[1]
    status, text = serve(RENDER, strings, request, 1000)
    if (status, text) != (-errno.EINVAL, b"'a' is undefined (chat template, line 1)"):
        raise RuntimeError(f"jinja2 {jinja2.__version__} does not behave: {text}")


def fork_child(fd, filter_program, base):
    try:
        if os.fork() == 0:
            child(fd, filter_program, base)
    except OSError as e:
        reply = f"the template helper cannot fork: {e}".encode()
        try:
            os.write(fd, b"!" + REPLY.pack(-errno.ENOMEM, 0, len(reply)) + reply)
        except OSError:
            pass  # nobody waits for it any more


def main():
    control = socket.socket(fileno=CONTROL)
    filter_program = control.recv(65536)
    try:
        time.tzset()
        warm_up()
    except Exception as e:
        control.send(str(e).encode()[:MAX_ERROR])
        return
    with open("/proc/self/statm", "rb") as f:
        base = int(f.read().split()[0]) * resource.getpagesize()
    drop_privileges()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    gc.collect()
    gc.disable()
    gc.freeze()
    control.send(b"ok")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        for fd in fds:
            fork_child(fd, filter_program, base)
            os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
