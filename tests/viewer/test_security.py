"""What the viewer must refuse, asked over a real socket."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from gradtrace.viewer.security import Access, access_for, host_name
from tests.viewer.conftest import write_run
from tests.viewer.serving import serving

SECRET = "a very private file"


@pytest.fixture
def client(origin: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=origin) as client:
        yield client


def raw_request(origin: str, data: bytes, most: int = 1 << 20) -> bytes:
    """What the server answers to exactly these bytes."""
    where = urlsplit(origin)
    with socket.create_connection((where.hostname, where.port), timeout=10) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # refused before we were done; the answer is what counts
        answer = b""
        try:
            while len(answer) < most and (part := connection.recv(65536)):
                answer += part
        except ConnectionResetError:
            pass
        return answer


def raw_get(origin: str, target: str, *headers: str) -> bytes:
    host = urlsplit(origin).netloc
    lines = [f"GET {target} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
    return raw_request(origin, ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))


TRAVERSALS = [
    "/static/../server.py",
    "/static/../../../../../../../../etc/passwd",
    "/static/%2e%2e/server.py",
    "/static/%2e%2e%2f%2e%2e%2fserver.py",
    "/static/..%2f..%2fserver.py",
    "/static/%252e%252e%252fserver.py",
    "/static/..%5c..%5cserver.py",
    "/static/....//server.py",
    "/static//etc/passwd",
    "/static/%2fetc%2fpasswd",
    "/static/js/%c0%ae%c0%ae/main.js",
    "/static/js/main.js%00.css",
    "/static/file:///etc/passwd",
    "/api/runs/..%2f..%2fsecret/news",
    "/api/runs/0/steps/..%2f..%2f..%2fsecret",
    "/api/runs/%2e%2e/steps/1",
    "/api/runs/0/steps/1/groups/../../../../secret",
    "//etc/passwd",
    "/..;/etc/passwd",
]


@pytest.mark.parametrize("target", TRAVERSALS)
def test_no_path_leaves_the_served_files(origin: str, target: str) -> None:
    answer = raw_get(origin, target)
    status = answer.split(b" ", 2)[1]
    assert status in (b"400", b"404")
    assert b"root:" not in answer and b"import" not in answer


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil", "[::1", "", "a b"]
)
def test_foreign_hosts_are_refused(origin: str, host: str) -> None:
    answer = raw_request(origin, f"GET /api/runs HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert answer.split(b" ", 2)[1] in (b"421", b"400")
    assert b"chains" not in answer


def test_two_hosts_are_refused(origin: str) -> None:
    answer = raw_request(
        origin,
        b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
    )
    assert answer.split(b" ", 2)[1] in (b"421", b"400")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "localhost:9999", "[::1]:8000"])
def test_loopback_names_are_served_on_any_port_for_ssh_tunnels(client: httpx.Client, host: str) -> None:
    assert client.get("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin_header", ["http://evil.example", "null", "http://localhost.evil.example", "file://"])
def test_pages_of_other_sites_get_nothing(client: httpx.Client, origin_header: str) -> None:
    assert client.get("/api/runs", headers={"origin": origin_header}).status_code == 403


def test_other_sites_cannot_embed_our_answers_but_may_link_here(client: httpx.Client) -> None:
    embedded = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    linked = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/api/runs", headers=embedded).status_code == 403
    assert client.get("/", headers=linked).status_code == 200


def test_our_own_origin_is_served(client: httpx.Client, origin: str) -> None:
    assert client.get("/api/runs", headers={"origin": origin}).status_code == 200


def test_no_answer_allows_another_origin(client: httpx.Client, origin: str) -> None:
    for path in ("/", "/api/runs", "/static/js/main.js", "/nowhere"):
        headers = client.get(path, headers={"origin": origin}).headers
        assert not any(name.startswith("access-control") for name in headers)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/static/js/main.js",
        "/api/runs",
        "/api/runs/0/steps/1/groups/0/tokens",
        "/nowhere",
        "/api/runs/99/news",
    ],
)
def test_every_answer_carries_the_security_headers(client: httpx.Client, path: str) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "*" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "server" not in headers or "uvicorn" in headers["server"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_the_viewer_only_reads(client: httpx.Client, method: str) -> None:
    assert client.request(method, "/api/runs").status_code in (405, 400)


def test_bodies_are_refused(origin: str) -> None:
    answer = raw_get(origin, "/api/runs", "Content-Length: 10")
    assert answer.split(b" ", 2)[1] in (b"413", b"400")
    answer = raw_get(origin, "/api/runs", "Transfer-Encoding: chunked")
    assert answer.split(b" ", 2)[1] in (b"413", b"400")


MALFORMED = [
    b"\x00\x01\x02\x03\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET " + b"a" * 100 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 300_000 + b"\r\n\r\n",
    b"GET /api/runs?" + b"q" * 300_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"A" * 200_000,
]


@pytest.mark.parametrize("data", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_and_huge_requests_do_not_hurt(origin: str, client: httpx.Client, data: bytes) -> None:
    answer = raw_request(origin, data)
    assert answer == b"" or answer.split(b" ", 2)[1].startswith(b"4")
    assert client.get("/api/runs").status_code == 200


def test_long_targets_are_refused(client: httpx.Client) -> None:
    assert client.get("/api/runs?x=" + "1" * 5000).status_code == 414


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/99/news",
        "/api/runs/-1/news",
        "/api/runs/0/steps/999999",
        "/api/runs/0/steps/" + "9" * 1500,
        "/api/runs/0/steps/1/groups/999",
        "/api/runs/0/steps/1/groups/0/pairwise/999",
        "/api/runs/0/steps/1/groups/0/pairwise/on/999",
        "/api/runs/0x0/news",
        "/api/runs/٣/news",
        "/api/nothing",
    ],
)
def test_numbers_that_name_nothing_are_not_found(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    "query",
    ["metrics=-1", "metrics=1e9", "metrics=nan", "metrics=x", "entropy_trace=inf", "metrics=" + "1" * 40],
)
def test_query_numbers_are_checked(client: httpx.Client, query: str) -> None:
    assert client.get(f"/api/runs/0/news?{query}").status_code == 400


def test_a_score_that_does_not_exist_is_refused(client: httpx.Client) -> None:
    assert client.get("/api/runs/0/steps/1/miniatures?score=../secret").status_code == 400


def test_symlinks_out_of_a_run_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(json.dumps({"step": 1, "critic/rewards/mean": 0.5, "note": SECRET}) + "\n")
    run = write_run(tmp_path / "runs" / "linked", groups=2, steps=2)
    for name in (
        "metrics.jsonl",
        "config.yaml",
        "summary.json",
        "token_bytes.npz",
        "entropy_trace/manifest.jsonl",
    ):
        (run / name).unlink()
        (run / name).symlink_to(secret)
    step = next((run / "influence_trace/steps").iterdir())
    outside = tmp_path / "outside.npz"
    os.replace(step, outside)
    step.symlink_to(outside)
    with serving([run]) as origin:
        for path in ("/api/runs", "/api/runs/0/news", "/api/runs/0/steps/1", "/api/runs/0/steps/2"):
            answer = httpx.get(origin + path)
            assert SECRET not in answer.text
        news = httpx.get(origin + "/api/runs/0/news").json()
        assert news["metrics"]["rows"] == []
        assert any("leads out of the run" in problem for problem in news["problems"])
        number = int(step.name.removeprefix("step_").removesuffix(".npz"))
        assert httpx.get(f"{origin}/api/runs/0/steps/{number}").status_code == 422


def test_a_run_that_links_elsewhere_is_not_listed_unless_named(tmp_path: Path) -> None:
    outside = write_run(tmp_path / "elsewhere" / "private", groups=2, steps=1)
    inside = write_run(tmp_path / "runs" / "mine", groups=2, steps=1)
    (tmp_path / "runs" / "link").symlink_to(outside)
    with serving([inside], tmp_path / "runs") as origin:
        listing = httpx.get(origin + "/api/runs").json()
        assert [run["name"] for run in listing["runs"]] == ["mine"]
        assert "private" in listing["skipped"][0]
    with serving([tmp_path / "runs" / "link"], tmp_path / "runs") as origin:
        assert {run["name"] for run in httpx.get(origin + "/api/runs").json()["runs"]} == {"mine", "private"}


# ---------------------------------------------------------------- token


@pytest.fixture
def guarded(runs_dir: Path) -> Iterator[str]:
    access = Access(hosts=frozenset({"127.0.0.1", "localhost"}), token="right-token", cookie="gradtrace_test")
    with serving([runs_dir / "chains"], access=access) as address:
        yield address


@pytest.mark.parametrize("path", ["/", "/static/js/main.js", "/api/runs", "/nowhere"])
def test_without_the_token_nothing_is_served(guarded: str, path: str) -> None:
    assert httpx.get(guarded + path).status_code == 401
    assert httpx.get(guarded + path + "?token=wrong").status_code == 401
    assert httpx.get(guarded + path, headers={"authorization": "Bearer wrong"}).status_code == 401
    assert httpx.get(guarded + path, headers={"cookie": "gradtrace_test=wrong"}).status_code == 401


def test_the_link_sets_a_cookie_and_leaves_the_address(guarded: str) -> None:
    with httpx.Client(base_url=guarded) as client:
        first = client.get("/?token=right-token")
        assert first.status_code == 303 and "token" not in first.headers["location"]
        cookie = first.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=lax" in cookie
        assert client.get("/").status_code == 200
        assert client.get("/api/runs").status_code == 200


def test_the_bearer_header_works_for_scripts(guarded: str) -> None:
    assert httpx.get(guarded + "/api/runs", headers={"authorization": "Bearer right-token"}).status_code == 200


def test_any_host_but_loopback_gets_a_token() -> None:
    assert access_for("127.0.0.1", 1, None).token is None
    assert access_for("localhost", 1, "mine").token == "mine"
    for host in ("0.0.0.0", "192.0.2.7", "::", "example.org"):
        access = access_for(host, 1, None)
        assert access.token is not None and len(access.token) >= 20
    assert access_for("0.0.0.0", 1, None).token != access_for("0.0.0.0", 1, None).token


def test_bound_everywhere_addresses_are_allowed_and_names_are_not() -> None:
    access = access_for("0.0.0.0", 1, None)
    assert access.allows_host("192.0.2.7:1") and access.allows_host("[2001:db8::1]:1")
    assert not access.allows_host("rebound.example:1")


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost:80", "localhost"),
        ("LOCALHOST", "localhost"),
        ("[::1]:80", "::1"),
        ("[::1]", "::1"),
        ("", None),
        (":80", None),
        ("a:b", None),
        ("a@b", None),
        ("[evil]", None),
        ("a/b", None),
        ("ⅼocalhost", None),
    ],
)
def test_host_names_are_parsed_strictly(header: str, name: str | None) -> None:
    assert host_name(header) == name


# ---------------------------------------------------------------- caching


def test_an_unchanged_answer_is_not_sent_twice(client: httpx.Client) -> None:
    for path in ("/", "/static/js/main.js", "/api/runs/0/steps/1", "/api/runs/0/steps/1/groups/0/tokens"):
        first = client.get(path)
        again = client.get(path, headers={"if-none-match": first.headers["etag"]})
        assert again.status_code == 304 and again.content == b""


def test_polling_sends_only_what_is_new(client: httpx.Client) -> None:
    everything = client.get("/api/runs/0/news").json()
    assert len(everything["metrics"]["rows"]) == 5 and len(everything["traces"]["entropy_trace"]["steps"]) == 5
    metrics = everything["metrics"]
    newest = {kind: trace["newest"] for kind, trace in everything["traces"].items()}
    query = {"metrics": metrics["to"], "metrics_file": metrics["file"], **newest}
    nothing = client.get("/api/runs/0/news", params=query).json()
    assert nothing["metrics"]["rows"] == [] and nothing["metrics"]["continued"]
    assert all(trace["steps"] == [] for trace in nothing["traces"].values())
