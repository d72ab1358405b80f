import hashlib
import zipfile

import release


def test_the_zip_of_a_site_holds_every_file_and_has_the_same_bytes_twice(tmp_path):
    folder = tmp_path / "html"
    (folder / "notebooks").mkdir(parents=True)
    (folder / "index.html").write_text("<p>first</p>")
    (folder / "notebooks" / "page.html").write_text("<p>page</p>")
    for name in ("one.zip", "two.zip"):
        release.zip_folder(folder, tmp_path / name, "site")
        (folder / "index.html").touch()
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "one.zip") as archive:
        assert archive.namelist() == ["site/index.html", "site/notebooks/page.html"]
        assert archive.read("site/index.html") == b"<p>first</p>"


def test_checksums_are_those_of_the_files(tmp_path):
    (tmp_path / "a.whl").write_bytes(b"wheel")
    (tmp_path / "SHA256SUMS").write_text("old")
    assert release.checksums(tmp_path) == f"{hashlib.sha256(b'wheel').hexdigest()}  a.whl\n"
