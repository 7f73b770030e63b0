"""A registry of one image with two layers on port 5000 of this host: `python3 registry.py GATE`.

It sends the second layer when the file GATE exists. Served: what `docker pull` requests, by the distribution
specification of the Open Container Initiative.
"""

import gzip
import hashlib
import io
import json
import sys
import tarfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

POLL_S = 0.1
DOCKER = "application/vnd.docker."


def layer(**links):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, target in links.items():
            one = tarfile.TarInfo(name)
            one.type, one.linkname = (tarfile.SYMTYPE, target) if target else (tarfile.DIRTYPE, "")
            archive.addfile(one)
    return data.getvalue()


def digest(data):
    return "sha256:" + hashlib.sha256(data).hexdigest()


def described(data, kind):
    return {"mediaType": DOCKER + kind, "size": len(data), "digest": digest(data)}


tars = [layer(usr="", proc="", tmp="", dev="", etc="", sys=""), layer(bin="usr/bin", lib="usr/lib", lib64="usr/lib64")]
layers = [gzip.compress(tar, mtime=0) for tar in tars]
config = json.dumps(
    {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [*map(digest, tars)]},
    }
).encode()
kinds = ("image.rootfs.diff.tar.gzip", "container.image.v1+json", "distribution.manifest.v2+json")
manifest = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": DOCKER + kinds[2],
        "config": described(config, kinds[1]),
        "layers": [described(one, kinds[0]) for one in layers],
    }
).encode()
blobs = {digest(one): one for one in (config, *layers)}


class Registry(BaseHTTPRequestHandler):
    def do_GET(self):
        what = self.path.rpartition("/")[2]
        data = manifest if "/manifests/" in self.path else blobs.get(what, b"{}")
        while data == layers[1] and not Path(sys.argv[1]).exists():
            time.sleep(POLL_S)
        self.send_response(200)
        if data == manifest:
            self.send_header("Content-Type", DOCKER + kinds[2])
            self.send_header("Docker-Content-Digest", digest(manifest))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_HEAD = do_GET


ThreadingHTTPServer(("127.0.0.1", 5000), Registry).serve_forever()
