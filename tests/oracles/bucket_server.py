"""A small Google Cloud Storage on this machine, in memory: `python bucket_server.py PORT`.

It keeps the promises of the JSON API that checkpoints rely on: every write gives an object a new
generation, conditions on generations hold, and writes are atomic. Anyone may read and write, except
objects below `forbidden/`.
"""

import base64
import email
import hashlib
import http.server
import itertools
import json
import re
import sys
import threading
import urllib.parse

OBJECTS: dict[str, tuple[int, bytes, str]] = {}
GENERATIONS = itertools.count(1_700_000_000_000_000)
LOCK = threading.Lock()
UPLOADS: dict[str, tuple[str, bytearray, dict]] = {}
BASE = r"/(?P<way>upload/|download/)?storage/v1/b/(?P<bucket>[^/]+)"


def described(bucket, name):
    generation, data, kind = OBJECTS[name]
    return {
        "kind": "storage#object",
        "name": name,
        "bucket": bucket,
        "generation": str(generation),
        "metageneration": "1",
        "size": str(len(data)),
        "contentType": kind,
        "md5Hash": base64.b64encode(hashlib.md5(data).digest()).decode(),
        "updated": "2026-01-01T00:00:00.000Z",
        "timeCreated": "2026-01-01T00:00:00.000Z",
        "storageClass": "STANDARD",
        "etag": str(generation),
    }


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def reply(self, code, body=b"", headers=()):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(code)
        for name, value in {
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
            **dict(headers),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, code, message):
        if code == 304:  # has no body
            self.send_response(code)
            return self.end_headers()
        return self.reply(
            code, {"error": {"code": code, "message": message, "errors": [{"message": message}]}}
        )

    def answer(self):
        url = urllib.parse.urlsplit(self.path)
        query = {name: values[-1] for name, values in urllib.parse.parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))

        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self.chunks()
        if "forbidden" in self.path or b"forbidden/" in body:
            return self.refuse(403, "the caller does not have storage.objects access to the bucket")

        match = re.fullmatch(BASE + r"(?:/o(?:/(?P<name>.*))?)?", url.path)
        if not match:
            return self.refuse(404, f"no such place: {self.path}")
        bucket = match["bucket"]
        name = match["name"] and urllib.parse.unquote(match["name"])

        with LOCK:
            if match["way"] == "upload/":
                return self.upload(bucket, query, body)
            if name and "/rewriteTo/b/" in url.path:
                return self.rewrite(match["name"])
            if name:
                return self.one(bucket, name, query)
            if url.path.endswith("/o"):
                return self.listing(bucket, query)

        return self.reply(
            200,
            {
                "kind": "storage#bucket",
                "name": bucket,
                "location": "US",
                "storageClass": "STANDARD",
            },
        )

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = answer

    def chunks(self):
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def allowed(self, name, query):
        """Return whether conditions on the object's generation hold; a missing object has 0."""
        generation = OBJECTS[name][0] if name in OBJECTS else 0
        if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != generation:
            self.refuse(412, "conditionNotMet")
        elif "ifGenerationNotMatch" in query and int(query["ifGenerationNotMatch"]) == generation:
            self.refuse(304 if self.command == "GET" else 412, "conditionNotMet")
        else:
            return True
        return False

    def one(self, bucket, name, query):
        if not self.allowed(name, query):
            return None
        if name not in OBJECTS:
            return self.refuse(404, f"No such object: {bucket}/{name}")

        if self.command == "DELETE":
            del OBJECTS[name]
            return self.reply(204)
        if query.get("alt") != "media":
            return self.reply(200, described(bucket, name))

        generation, data, kind = OBJECTS[name]
        headers = {"x-goog-generation": str(generation), "Content-Type": kind}
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))

        if not found:
            return self.reply(200, data, headers)
        first = int(found[1]) if found[1] else max(len(data) - int(found[2]), 0)
        last = min(int(found[2]) if found[1] and found[2] else len(data) - 1, len(data) - 1)
        if first > last:
            return self.refuse(416, "the range is empty")

        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        return self.reply(206, data[first : last + 1], headers)

    def listing(self, bucket, query):
        prefix = query.get("prefix", "")
        delimiter = query.get("delimiter")
        items = []
        prefixes = []
        for name in sorted(OBJECTS):
            if not name.startswith(prefix) or name < query.get("startOffset", ""):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.append(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                items.append(described(bucket, name))
        return self.reply(
            200, {"kind": "storage#objects", "items": items, "prefixes": sorted(set(prefixes))}
        )

    def upload(self, bucket, query, body):
        if "upload_id" in query:
            name, data, begun = UPLOADS[query["upload_id"]]
            data += body
            if re.search(r"/\*$", self.headers.get("Content-Range", "")):
                return self.reply(308, b"", {"Range": f"bytes=0-{len(data) - 1}"})
            return self.store(bucket, name, bytes(data), begun)

        kind = query.get("uploadType", "media")
        if kind == "multipart":
            message = email.message_from_bytes(
                b"Content-Type: " + self.headers["Content-Type"].encode() + b"\r\n\r\n" + body
            )
            about, content = (part.get_payload(decode=True) for part in message.get_payload())
            return self.store(
                bucket, json.loads(about).get("name", query.get("name")), content, query
            )

        if kind == "resumable":
            name = query.get("name") or json.loads(body)["name"]
            number = str(len(UPLOADS))
            UPLOADS[number] = (name, bytearray(), query)
            place = (
                f"http://{self.headers['Host']}/upload/storage/v1/b/{bucket}/o"
                f"?uploadType=resumable&upload_id={number}"
            )
            return self.reply(200, b"", {"Location": place})

        return self.store(bucket, query["name"], body, query)

    def store(self, bucket, name, data, query):
        if not self.allowed(name, query):
            return None
        OBJECTS[name] = (next(GENERATIONS), data, "application/octet-stream")
        return self.reply(200, described(bucket, name))

    def rewrite(self, path):
        source, target = (
            urllib.parse.unquote(part) for part in re.split(r"/rewriteTo/b/[^/]+/o/", path)
        )
        if source not in OBJECTS:
            return self.refuse(404, f"No such object: {source}")
        OBJECTS[target] = (next(GENERATIONS), *OBJECTS[source][1:])
        size = str(len(OBJECTS[target][1]))
        done = {
            "kind": "storage#rewriteResponse",
            "done": True,
            "objectSize": size,
            "totalBytesRewritten": size,
        }
        return self.reply(200, {**done, "resource": described("bucket", target)})


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Server).serve_forever()
