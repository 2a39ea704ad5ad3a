//! Tests that damaged files are refused, unless their content is still right.

use super::*;
use crate::value::Text;

#[test]
fn cut_files_are_refused() {
    let bytes = small();
    assert!(opened(&bytes).is_ok());
    for len in 0..bytes.len() {
        assert!(opened(&bytes[..len]).is_err(), "cut to {len} bytes");
    }
}

/// The bytes of the storages, each with its key.
type Storages = Vec<(Text, Vec<u8>)>;

/// Returns the content, that is, the values and the storages. `None` if a checksum, which the caller verifies, does not
/// match.
fn content(bytes: &[u8]) -> Option<(Value, Storages)> {
    let Opened { root, storages, others: _, arrays: _ } = opened(bytes).ok()?;
    let storages = storages.into_iter().map(|(key, record)| {
        let (start, len) = (record.offset as usize, record.len as usize);
        let data = &bytes[start..start + len];
        (crc32fast::hash(data) == record.crc32).then(|| (key, data.to_vec()))
    });
    Some((root, storages.collect::<Option<_>>()?))
}

#[test]
fn damaged_files_are_refused_or_right() {
    let bytes = small();
    let right = content(&bytes);
    assert!(right.is_some());
    let mut accepted = 0;
    for flip in [0x01, 0x80, 0xff] {
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            // Bytes that are not read may be damaged.
            if let Some(found) = content(&damaged) {
                assert_eq!(Some(found), right, "byte {at} by {flip}");
                accepted += 1;
            }
        }
    }
    assert!(accepted > 0 && accepted < 2 * bytes.len(), "{accepted}");
}

/// The same for damage within the pickle, in archives whose checksums match.
#[test]
fn damaged_pickles_never_panic() {
    let root = Value::Dict(vec![
        (text("w"), Value::from(tensor("0", 1, &[3], &[1]))),
        (text("n"), Value::Tuple(vec![Value::Int(1 << 40), Value::Float(0.5), Value::None])),
    ]);
    let pickle = pickle::write(&root, &[("0".to_owned(), 16)], &Limits::default()).unwrap();
    assert!(opened(&with_pickle(&pickle)).is_ok());
    for at in 0..pickle.len() {
        assert!(opened(&with_pickle(&pickle[..at])).is_err());
        for byte in 0..=255 {
            let mut damaged = pickle.clone();
            damaged[at] = byte;
            drop(opened(&with_pickle(&damaged)));
        }
    }
}
