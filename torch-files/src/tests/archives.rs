//! Tests that hostile archives are refused.

use ::zip::{DateTime, System};

use super::*;

fn with_names(names: &[&str]) -> String {
    let mut records = vec![("a/data.pkl", b"\x80\x02N.".as_slice())];
    records.extend(names.iter().map(|&name| (name, b"xy".as_slice())));
    refused(&archive(&records))
}

#[test]
fn archives_with_odd_names_are_refused() {
    for name in ["/a/b", "a/../b", "../a/b", "a//b", "a/./b", "b", "a\\b", "a/b\\c", "a/", "a/b\0c"]
    {
        let error = with_names(&[name]);
        assert!(error.contains("folder/name"), "{name}: {error}");
    }
    assert!(with_names(&["b/c"]).contains("same folder"));
    assert!(refused(&archive(&[("a/byteorder", b"little")])).contains("no data.pkl"));
    let big = [("a/data.pkl", b"\x80\x02N.".as_slice()), ("a/byteorder", b"big")];
    assert!(refused(&archive(&big)).contains("says big"));
}

#[test]
fn archives_with_a_name_twice_are_refused() {
    let mut bytes =
        archive(&[("a/data.pkl", b"\x80\x02N."), ("a/data/0", b"x"), ("a/data/1", b"x")]);
    let name = b"a/data/1";
    let places: Vec<_> = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(name)).collect();
    assert_eq!(places.len(), 2, "the local and the central header");
    for at in places {
        bytes[at + 7] = b'0';
    }
    assert!(refused(&bytes).contains("the same name"));
}

/// Makes an archive in which the central header of a record is changed.
fn with_central(name: &[u8], change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut bytes = archive(&[("a/data.pkl", b"\x80\x02N."), ("a/data/0", &[7; 100])]);
    let at =
        (46..bytes.len()).rfind(|&at| bytes[at..].starts_with(name)).expect("the record is there");
    change(&mut bytes[at - 46..]);
    bytes
}

#[test]
fn records_that_are_not_stored_as_they_are_are_refused() {
    let name = b"a/data/0";
    let cases: [(Vec<u8>, &str); 6] = [
        (with_central(name, |header| header[10] = 8), "is compressed"),
        (with_central(name, |header| header[8] |= 1), "is encrypted"),
        (with_central(name, |header| header[24] = 200), "two sizes"),
        (with_central(name, |header| header[42..46].fill(0)), "overlap"),
        (
            with_central(name, |header| {
                header[20..28].copy_from_slice(&[200, 0, 0, 0, 200, 0, 0, 0])
            }),
            "overlap",
        ),
        // The claim of a zip bomb: 4 GiB less 2 bytes in 100 bytes.
        (
            with_central(name, |header| {
                header[20..28].copy_from_slice(&[254, 255, 255, 255, 254, 255, 255, 255])
            }),
            "overlap",
        ),
    ];
    for (bytes, expected) in cases {
        let error = refused(&bytes);
        assert!(error.contains(expected), "{error}");
    }
    let damaged = with_central(b"a/data.pkl", |header| header[16] ^= 1);
    assert!(refused(&damaged).contains("checksum"));
    assert!(opened(&with_central(name, |_| {})).is_ok());
}

#[test]
fn torch_scripts_code_may_be_compressed() {
    let records: [(&str, &[u8]); 2] = [("a/data.pkl", b"\x80\x02N."), ("a/code/x.py", b"code")];
    let mut bytes = archive(&records);
    let at = bytes.windows(11).rposition(|name| name == b"a/code/x.py").unwrap() - 46;
    bytes[at + 10] = 8;
    let opened = opened(&bytes).unwrap();
    assert_eq!(opened.others.len(), 1, "data.pkl only");
}

/// The zip crate tolerates this, like Python's `zipfile`.
#[test]
fn junk_around_the_archive_is_tolerated() {
    let bytes = small();
    let expected = opened(&bytes).unwrap();
    let around = [(0, 0), (7, 0), (0, 7), (64, 64)];
    for (before, after) in around {
        let junk = [vec![b'x'; before], bytes.clone(), vec![b'x'; after]].concat();
        let found = opened(&junk).unwrap();
        assert_eq!(found.root, expected.root);
        assert_eq!(found.storages["0"].offset, expected.storages["0"].offset + before as u64);
    }
}

/// The zip crate makes the same bytes with these options, apart from names and sizes that this crate refuses.
#[test]
fn an_archive_has_the_bytes_that_the_zip_crate_writes() {
    for lens in [vec![], vec![0, 1, 63, 64, 65, 300], (0..130).collect(), vec![7; 1000]] {
        let data: Vec<_> = lens.iter().map(|&len: &usize| vec![len as u8; len]).collect();
        let sizes: Vec<_> = data
            .iter()
            .enumerate()
            .map(|(key, data)| (key.to_string(), data.len() as u64))
            .collect();
        let mut fill = |index: usize, out: &mut dyn Write| out.write_all(&data[index]);
        let pickle = vec![b'p'; 11 * lens.len()];
        let ours = container::write(Cursor::new(Vec::new()), &pickle, &sizes, &mut fill).unwrap();
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Stored)
            .last_modified_time(DateTime::default())
            .system(System::Unix)
            .unix_permissions(0o644)
            .with_alignment(64);
        let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
        let mut record = |name: &str, data: &[u8]| {
            zip.start_file(format!("archive/{name}"), options).unwrap();
            zip.write_all(data).unwrap();
        };
        record("data.pkl", &pickle);
        record("byteorder", b"little");
        sizes.iter().zip(&data).for_each(|((key, _), data)| record(&format!("data/{key}"), data));
        record("version", b"3\n");
        assert!(ours.into_inner() == zip.finish().unwrap().into_inner(), "{lens:?}");
    }
}
