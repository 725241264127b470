"""Who the page answers: this user's browser, by our name, to read."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from kimi_eagle.registry.store import Registry
from kimi_eagle.ui.access import Access
from kimi_eagle.ui.server import listen
from kimi_eagle.ui.site import site

TOKEN = "a-token-that-nobody-guesses"
BASE = "http://127.0.0.1:8265"
COOKIE = {"cookie": f"kimi-eagle-8265={TOKEN}"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    Registry(tmp_path).close()
    app = Access(site(tmp_path), token=TOKEN, port=8265)
    with TestClient(app, base_url=BASE, follow_redirects=False) as found:
        yield found


def test_the_first_address_leaves_a_cookie_and_no_token(client: TestClient) -> None:
    answer = client.get(f"/runs?q=x&token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs?q=x")
    cookie = answer.headers["set-cookie"]
    for part in ("kimi-eagle-8265=", "HttpOnly", "SameSite=Strict", "Path=/"):
        assert part in cookie
    assert client.get("/runs").status_code == 200  # the client keeps cookies, as a browser does


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"cookie": "kimi-eagle-8265=guess"},
        {"cookie": f"kimi-eagle-8266={TOKEN}"},
        {"authorization": "Bearer guess"},
    ],
)
@pytest.mark.parametrize("path", ["/runs", "/runs.json", "/static/page.js", "/runs?token=guess"])
def test_without_the_token_nothing_is_shown(
    client: TestClient, path: str, headers: dict[str, str]
) -> None:
    answer = client.get(path, headers=headers)
    assert answer.status_code == 403
    assert "kimi-eagle ui" in answer.text
    assert "set-cookie" not in answer.headers


def test_a_program_may_send_the_token_as_a_header(client: TestClient) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert client.get("/runs.json", headers=headers).json()["total"] == 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8265", 200),
        ("localhost:9000", 200),
        ("LOCALHOST", 200),
        ("[::1]:8265", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:8265", 421),
        ("localhost@evil.example", 421),
        ("", 421),
    ],
)
def test_a_name_that_was_made_to_point_here_is_refused(
    client: TestClient, host: str, status: int
) -> None:
    assert client.get("/runs", headers={**COOKIE, "host": host}).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": BASE}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
def test_other_origins_are_refused_even_with_the_cookie(
    client: TestClient, headers: dict[str, str], status: int
) -> None:
    answer = client.get("/runs", headers={**COOKIE, **headers})
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "XYZ"])
def test_only_reading_is_allowed(client: TestClient, method: str) -> None:
    answer = client.request(method, "/runs", headers=COOKIE)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_every_answer_says_what_a_browser_may_do_with_it(client: TestClient) -> None:
    for path in ("/runs", "/runs.json", "/static/page.js", "/nothing", f"/?token={TOKEN}"):
        headers = client.get(path, headers=COOKIE).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'self'")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", ["/static/../site.py", "/static/%2e%2e/site.py", "//evil.example"])
def test_a_path_leads_nowhere_else(client: TestClient, path: str) -> None:
    assert client.get(BASE + path, headers=COOKIE).status_code == 404
    led = client.get(f"{BASE}{path}?token={TOKEN}").headers.get("location", "/")
    assert not led.startswith("//")


def test_a_port_that_is_taken_is_told_or_another_is_found() -> None:
    with listen("127.0.0.1", 0) as first:
        taken = first.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{taken}"):
            listen("127.0.0.1", taken)


def serving(root: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kimi_eagle", "--root", str(root), "ui", "--port", "0"]
    return subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_what_others_may_reach_is_known_by_the_names_of_this_machine(tmp_path: Path) -> None:
    Registry(tmp_path).close()
    process = serving(tmp_path, "--host", "0.0.0.0")
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        name = socket.gethostname()
        assert address.startswith(f"http://{name}:")
        port = address.partition("/?")[0].rpartition(":")[2]
        for host, status in ((name, 200), ("evil.example", 421)):
            connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
            headers = {"Host": f"{host}:{port}", "Authorization": f"Bearer {address.split('=')[1]}"}
            connection.request("GET", "/runs", headers=headers)
            assert connection.getresponse().status == status
            connection.close()
    finally:
        process.terminate()
        _, told = process.communicate(timeout=20)
    assert "unencrypted" in told


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    Registry(tmp_path).close()
    process = serving(tmp_path)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(address, timeout=20) as answer:
            assert b"<h1>Runs</h1>" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(address.partition("?")[0], timeout=20)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    finally:
        process.kill()
        process.communicate()
