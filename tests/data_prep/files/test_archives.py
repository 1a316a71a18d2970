import bz2
import gzip
import io
import os
import resource
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data_prep.distribute.ordered_maps import ordered_map
from data_prep.files import archives
from data_prep.files.archives import (
    DamagedItem,
    InFile,
    InTar,
    InZip,
    Location,
    Missing,
    tar_entries,
    zip_entries,
)
from data_prep.files.tree import Tree
from pospre.errors import UserError
from tests.data_prep.sample_images import write_files
from tests.data_prep.sources.fakes import tar_bytes, write_zip
from tests.refusals import refuses

FILES = {f"top/{number}.bin": os.urandom(100 * number) for number in range(9)}


def contents(path: Path) -> dict[str, bytes]:
    entries = tar_entries(path) if path.suffix == ".tar" else zip_entries(path)
    return {entry.name: entry.location.read() for entry in entries}


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_every_kind_with_long_names(tmp_path: Path, kind: int) -> None:
    files = FILES | {f"./{'deep/' * 18}äö.bin": b"long"}
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=kind) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo("top/link")
        link.type, link.linkname = tarfile.SYMTYPE, "0.bin"
        archive.addfile(link)
    read = {name.removeprefix("./"): data for name, data in files.items()}
    assert contents(path) == read | {"top/link": files["top/0.bin"]}


def link(name: str, target: str, kind: bytes = tarfile.LNKTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member.tobuf(tarfile.GNU_FORMAT)


def test_links_are_the_files_that_they_name(tmp_path: Path) -> None:
    path, symbolic = tmp_path / "a.tar", tarfile.SYMTYPE
    members = [
        link("later", "./b.bin", symbolic),
        header(3, name="./b.bin") + block(b"bbb"),
        header(3, name=".hidden") + block(b"hhh"),
        link("./c.bin", "./b.bin"),
        link("sub/d.bin", "../c.bin", symbolic),
        link("e.bin", ".hidden"),
        link("gone", "none.bin"),
        link("outside", "/etc/passwd", symbolic),
        link("circle", "circle", symbolic),
    ]
    found = {e.name: e.location for e in entries_of(path, b"".join(members) + bytes(1024))}
    missing = {name for name, location in found.items() if location == Missing()}
    assert missing == {"gone", "outside", "circle"}
    read = {name: location.read() for name, location in found.items() if name not in missing}
    same = dict.fromkeys(("later", "b.bin", "c.bin", "sub/d.bin"), b"bbb")
    assert read == same | {"e.bin": b"hhh"}
    assert [entry.name for entry in tar_entries(path, limit=2)] == ["later", "b.bin"]


def test_joined_tars_are_read_to_the_end(tmp_path: Path) -> None:
    names, path = sorted(FILES), tmp_path / "a.tar"
    first, second = (tar_bytes({n: FILES[n] for n in part}) for part in (names[:4], names[4:]))
    path.write_bytes(first + second + bytes(3 << 20))
    assert contents(path) == FILES
    outer = tar_bytes({"x.tar": first + second, "y.tar": first})
    inner = [tar_entries(path, inner=e.location) for e in entries_of(path, outer)]
    assert [[entry.name for entry in entries] for entries in inner] == [names, names[:4]]
    for joined, said in (
        (first + second[:700], "is cut off|ends"),
        (first + b"no tar", r"it ends at byte \d+, where no further tar begins"),
    ):
        path.write_bytes(joined)
        refuses(rf"a\.tar is damaged or not a tar: .*({said})", lambda: tar_entries(path))


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    hidden = {"__MACOSX/._a.jpg": b"x", ".git/a.jpg": b"x", "b/._c.jpg": b"x"}
    (tmp_path / "a.tar").write_bytes(tar_bytes(FILES | hidden))
    write_zip(tmp_path / "a.zip", FILES | hidden)
    assert contents(tmp_path / "a.tar") == contents(tmp_path / "a.zip") == FILES


def test_a_tar_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    whole = tar_bytes(FILES)
    end = max(entry.location.offset + 1024 for entry in entries_of(path, whole))
    for length in range(0, end, 256):
        path.write_bytes(whole[:length])
        refuses(r"a\.tar is damaged or not a tar", lambda: tar_entries(path))


def entries_of(path: Path, data: bytes) -> list:
    path.write_bytes(data)
    return tar_entries(path)


def test_a_damaged_header_is_no_end(tmp_path: Path) -> None:
    whole = bytearray(tar_bytes(FILES))
    at = whole.index(b"top/5.bin")
    whole[at : at + 9] = b"top/x.bin"
    (tmp_path / "a.tar").write_bytes(whole)
    refuses(r"ends after top/4\.bin", lambda: tar_entries(tmp_path / "a.tar"))


def header(size: int, kind: bytes = b"0", name: str = "x.jpg") -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def block(content: bytes) -> bytes:
    return content.ljust(-(-len(content) // 512) * 512, b"\0")


def pax(**numbers: str) -> bytes:
    """Extended attributes of the next member."""
    keys = {key.replace("_", "."): value for key, value in numbers.items()}
    member = tarfile.TarInfo("x.jpg")
    member.pax_headers = {**keys, "comment": "x"}
    return member.create_pax_header(member.get_info(), "utf-8")[:-512]


def negative() -> bytes:
    data = bytearray(header(1 << 62))
    data[124:136] = b"\xff" * 10 + b"\xfe\0"  # of base 256
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + sum(data[156:]) + 8 * ord(" "))
    return bytes(data)


SPARSE = {"GNU_sparse_major": "1", "GNU_sparse_minor": "0", "GNU_sparse_realsize": "99"}
HOSTILE = {
    "a sparse file of 8 EiB": header(8 << 60, tarfile.GNUTYPE_SPARSE),
    "a sparse file of 4 EiB": header(1 << 62, tarfile.GNUTYPE_SPARSE),
    "a file of 8 EiB": header(8 << 60),
    "a link of 8 EiB": header(8 << 60, tarfile.SYMTYPE),
    "a name of 8 EiB": header(8 << 60, tarfile.GNUTYPE_LONGNAME),
    "a name of 2 MiB": header(2 << 20, tarfile.GNUTYPE_LONGNAME) + bytes(2 << 20),
    "a chain of names": 3000 * (header(4, tarfile.GNUTYPE_LONGNAME) + block(b"abc")),
    "a chain of attributes": 3000 * (header(12, tarfile.XHDTYPE) + block(b"12 path=abc\n")),
    "a negative size": negative(),
    "a negative attribute": pax(size="-1024") + header(3) + block(b"abc"),
    "a large attribute": pax(size=f"{1 << 63}") + header(3) + block(b"abc"),
    "no map": pax(**SPARSE) + header(3) + block(b"abc"),
    "a long map": pax(**SPARSE) + header(512) + block(b"99999999999\n1\n"),
    "a broken map": pax(GNU_sparse_map="1,2,x", GNU_sparse_size="1") + header(3) + block(b"abc"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tar_is_damaged(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.tar"
    good = header(3, name="good.jpg") + block(b"abc")
    path.write_bytes(good + HOSTILE[name] + good + bytes(1024))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refuses(r"a\.tar is damaged or not a tar: .*; copy or download", lambda: tar_entries(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_a_sparse_member_is_passed_over(tmp_path: Path) -> None:
    """Its size is the unpacked one, which may be more than the whole tar."""
    good = header(3, name="good.jpg") + block(b"abc")
    sparse = pax(**SPARSE | {"GNU_sparse_realsize": "9999999"}) + header(512) + block(b"0\n")
    assert [
        entry.name for entry in entries_of(tmp_path / "a.tar", sparse + good + bytes(1024))
    ] == ["good.jpg"]


def test_a_file_of_holes_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "holes.jpg"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    for location in (InFile(str(path)), InTar(str(path), 0, 1 << 40)):
        with pytest.raises(DamagedItem, match=r"it has more than 2147483648 bytes"):
            location.read()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_compressed_tars_say_what_to_do(tmp_path: Path, pack) -> None:
    (tmp_path / "a.tar").write_bytes(pack(tar_bytes(FILES)))
    refuses(r"is compressed, .*unpack it \(tar -xf\)", lambda: tar_entries(tmp_path / "a.tar"))


def test_a_tar_inside_of_a_tar(tmp_path: Path) -> None:
    path = tmp_path / "outer.tar"
    path.write_bytes(tar_bytes({"a.tar": tar_bytes(FILES), "b.tar": tar_bytes({"x": b"y"})}))
    outer = {entry.name: entry.location for entry in tar_entries(path)}
    for name, wanted in (("a.tar", FILES), ("b.tar", {"x": b"y"})):
        inner = outer[name]
        assert isinstance(inner, InTar)
        found = tar_entries(path, inner=inner)
        assert {entry.name: entry.location.read() for entry in found} == wanted


def read_all(found: list[Location]) -> list[bytes]:
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda location: location.read(), found))


def test_many_processes_and_threads_read_one_archive(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes(FILES))
    entries = tar_entries(tmp_path / "a.tar") + zip_entries(write_zip(tmp_path / "a.zip", FILES))
    found = [entry.location for entry in entries] * 5
    wanted = read_all(found)  # opens the archives before the processes start
    assert wanted[: len(FILES)] == list(FILES.values())
    assert list(ordered_map(read_all, [found] * 4, num_workers=2)) == [wanted] * 4


def test_damage_found_while_reading(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "a.zip", FILES)
    data = bytearray(path.read_bytes())
    data[data.index(b"top/8.bin") + 300] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DamagedItem, match=r"in .*a\.zip: "):
        InZip(str(path), "top/8.bin").read()
    with pytest.raises(DamagedItem, match=r"a\.zip is truncated"):
        InTar(str(path), 10, 1 << 20).read()
    with pytest.raises(DamagedItem, match=r"it is listed, but missing"):
        Missing().read()
    path.write_bytes(data[:300])
    refuses(r"a\.zip is not a zip", lambda: zip_entries(path))


def test_what_unpacks_to_more_than_any_image_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_zip(tmp_path / "a.zip", {"bomb.png": bytes(10_000_000), "list.txt": b"x\n"}))
    monkeypatch.setattr(archives, "_MOST_BYTES", 9_999_999)
    with pytest.raises(
        DamagedItem, match=r"a\.zip: it unpacks to 10000000 bytes; the limit is 9999"
    ):
        InZip(path, "bomb.png").read()
    assert Tree(Path(path)).lines("list.txt", "a list") == ["x"]
    with pytest.raises(UserError, match=r"bomb\.png \(a list\) is not text: in .* it unpacks to"):
        Tree(Path(path)).lines("bomb.png", "a list")
    # what the index says holds, whatever the compressed bytes hold
    data = bytearray(Path(path).read_bytes())
    size = data.index(b"PK\1\2") + 24
    data[size : size + 4] = (1000).to_bytes(4, "little")
    other = tmp_path / "lying.zip"
    other.write_bytes(data)
    with pytest.raises(DamagedItem, match=r"lying\.zip: "):
        InZip(str(other), "bomb.png").read()


def test_a_tree_is_the_same_packed_and_unpacked(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "folder", FILES)
    packed = write_zip(tmp_path / "a.zip", FILES)
    beside = tmp_path / "beside"
    beside.mkdir()
    write_zip(beside / "one.zip", {f"top/{name}": b"x" for name in ("a", "b")})
    write_files(beside, {"top/c": b"y", "other.txt": b"z", ".hidden": b"x"})
    for tree in (Tree(folder), Tree(packed)):
        assert tree.names() == [name[4:] for name in FILES] and not tree.has("top")
        found = tree.find("3.bin")
        assert found is not None and found.location.read() == FILES["top/3.bin"]
        assert tree.find("top/3.bin") is None
    tree = Tree(beside)
    assert [entry.name for entry in tree.below("top")] == ["top/a", "top/b", "top/c"]
    assert tree.names() == ["one.zip", "other.txt", "top"] and tree.has("top")
    assert tree.names("top") == ["a", "b", "c"]
    assert Tree(beside / "other.txt").names() == []
    refuses(r"top/d \(the end\) is missing; found a, b, c\.", lambda: tree.need("top/d", "the end"))
    refuses(r"other\.txt \(the end\) is not JSON", lambda: tree.json("other.txt", "the end"))


def test_any_flipped_byte_of_a_zip_is_damage_and_nothing_else(tmp_path: Path) -> None:
    whole = write_zip(tmp_path / "whole.zip", {"a.txt": b"a" * 60, "b/ä.txt": b"b"}).read_bytes()
    path, damaged = tmp_path / "one.zip", 0
    for at in range(len(whole)):
        for mask in (1, 0x80, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :])
            archives._open_zip.cache_clear()
            try:
                for entry in zip_entries(path):
                    entry.location.read()
            except (UserError, DamagedItem):
                damaged += 1
    assert damaged > len(whole)
