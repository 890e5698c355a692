"""A web server on the loopback interface, with the misbehaviors of real ones."""

import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter

HOST = "https://data.test"  # the address under which the library knows the server


class Wire(HTTPAdapter):
    """Carries what is sent to `HOST` to the server, which needs no certificate then."""

    def __init__(self, port):
        super().__init__()
        self.port = port

    def send(self, request, **options):
        local = request.copy()
        local.url = f"http://127.0.0.1:{self.port}{urlsplit(request.url).path}"
        return super().send(local, **options)


class Server:
    """`answers` maps a path to a function of the handler; `requests` lists the requested paths."""

    def __init__(self):
        self.answers = {}
        self.requests = []
        self.stopped = threading.Event()
        self.url, self.port = HOST, 0

    def open_session(self):
        """Return a session that reaches the server at `HOST`, and nothing else."""
        session = requests.Session()
        session.adapters.clear()
        session.mount(HOST, Wire(self.port))
        return session

    def serve(self, path, body, *, claimed=None):
        """Send a body, with a Content-Length that may claim more than there is."""

        def answer(handler):
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(body) if claimed is None else claimed))
            handler.end_headers()
            handler.wfile.write(body)

        self.answers[path] = answer

    def serve_unannounced(self, path, body):
        """Send a body without a length."""

        def answer(handler):
            handler.send_response(200)
            handler.end_headers()
            handler.wfile.write(body)

        self.answers[path] = answer

    def stall(self, path, body):
        """Send half of a body, and the rest only after seconds."""

        def answer(handler):
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(body)))
            handler.end_headers()
            handler.wfile.write(body[: len(body) // 2])
            handler.wfile.flush()
            self.stopped.wait(3)
            handler.wfile.write(body[len(body) // 2 :])

        self.answers[path] = answer

    def drip(self, path, pause, head=b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n"):
        """Send a byte at a time, and never the last one."""

        def answer(handler):
            handler.wfile.write(head)
            while not self.stopped.wait(pause):
                handler.wfile.write(b"a")
                handler.wfile.flush()

        self.answers[path] = answer

    def redirect(self, path, target):
        def answer(handler):
            handler.send_response(302)
            handler.send_header("Location", target)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        self.answers[path] = answer

    def handle(self, handler):
        self.requests.append(handler.path)
        if handler.path not in self.answers:
            handler.send_error(404)
            return
        with suppress(ConnectionError):  # the client hung up, as it should
            self.answers[handler.path](handler)


@contextmanager
def running():
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.handle(self)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.port = http.server_port
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.stopped.set()
            http.shutdown()
            thread.join()
