//! The files of MNIST's format, which are called IDX.

use anyhow::{Context, Result, bail, ensure};
use flate2::read::GzDecoder;
use std::fs;
use std::io::Read;
use std::path::Path;

/// Reads images, and the height and the width of one.
pub fn read_images(folder: &Path, name: &str) -> Result<(Vec<u8>, [usize; 2])> {
    let (bytes, [_, height, width]) = read(folder, name)?;
    ensure!(height * width > 0, "{name}: the images have no pixels");
    Ok((bytes, [height, width]))
}

/// Reads labels.
pub fn read_labels(folder: &Path, name: &str) -> Result<Vec<u8>> {
    Ok(read::<1>(folder, name)?.0)
}

/// Reads the bytes of a file and their shape.
fn read<const N: usize>(folder: &Path, name: &str) -> Result<(Vec<u8>, [usize; N])> {
    let path = folder.join(name);
    let packed = folder.join(format!("{name}.gz"));
    let (path, is_packed) = if packed.exists() { (packed, true) } else { (path, false) };
    let mut bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    if is_packed {
        let mut plain = Vec::new();
        GzDecoder::new(bytes.as_slice())
            .read_to_end(&mut plain)
            .with_context(|| format!("cannot unpack {}", path.display()))?;
        bytes = plain;
    }
    parse(bytes).with_context(|| path.display().to_string())
}

/// Takes the header from the bytes of a file: two zeros, the type, the number of dimensions, and their sizes.
fn parse<const N: usize>(mut bytes: Vec<u8>) -> Result<(Vec<u8>, [usize; N])> {
    const UNSIGNED_BYTE: u8 = 8;
    let start = 4 + 4 * N;
    ensure!(
        bytes.len() >= start && bytes[..4] == [0, 0, UNSIGNED_BYTE, N as u8],
        "not a file of bytes with {N} dimensions in the format of MNIST"
    );
    let mut shape = [0; N];
    for (size, bytes) in shape.iter_mut().zip(bytes[4..start].chunks_exact(4)) {
        *size = bytes.iter().fold(0, |size, byte| 256 * size + usize::from(*byte));
    }
    let Some(count) = shape.iter().try_fold(1_usize, |count, size| count.checked_mul(*size)) else {
        bail!("the shape {shape:?} is too large");
    };
    let found = bytes.len() - start;
    ensure!(found == count, "the shape {shape:?} needs {count} bytes, and there are {found}");
    Ok((bytes.split_off(start), shape))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn a_header_is_checked_and_taken_away() {
        let mut file = vec![0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3];
        file.extend([1, 2, 3, 4, 5, 6]);
        assert_eq!(parse::<2>(file.clone()).unwrap(), (vec![1, 2, 3, 4, 5, 6], [2, 3]));
        assert!(parse::<3>(file.clone()).is_err());
        let error = parse::<2>(file[..17].to_vec()).unwrap_err().to_string();
        assert!(error.contains("needs 6 bytes, and there are 5"), "{error}");
        assert!(parse::<2>(file[..9].to_vec()).is_err());
        let mut large = vec![0, 0, 8, 3];
        large.extend([255; 12]);
        assert!(parse::<3>(large).unwrap_err().to_string().contains("too large"));
        file[2] = 13;
        assert!(parse::<2>(file).is_err());
    }
}
