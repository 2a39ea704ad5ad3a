//! Damaged files are refused, or right.

use super::*;

#[test]
fn cut_files_are_refused() {
    let bytes = small();
    assert!(opened(&bytes).is_ok());
    for len in 0..bytes.len() {
        assert!(opened(&bytes[..len]).is_err(), "cut to {len} bytes");
    }
}

#[test]
fn damaged_files_never_panic() {
    let bytes = small();
    for flip in [0x01, 0x80, 0xff] {
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            // Bytes that nobody reads may change.
            drop(opened(&damaged));
        }
    }
}

/// The same within the pickle, where the checksum would have found it.
#[test]
fn damaged_pickles_never_panic() {
    let root = Value::Dict(vec![
        (text("w"), Value::Tensor(tensor("0", 1, &[3], &[1]))),
        (text("n"), Value::Tuple(vec![Value::Int(1 << 40), Value::Float(0.5), Value::None])),
    ]);
    let pickle = crate::checkpoint::torch::write::pickle(&root, &[("0".to_owned(), 16)]).unwrap();
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
