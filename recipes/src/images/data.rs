//! Images with labels: Fashion-MNIST, other files in the format of MNIST, or handwritten digits.

use super::idx;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;

/// Where Debian's package `dataset-fashion-mnist` has its files.
const FASHION: &str = "/usr/share/datasets/fashion-mnist";
const CLOTHES: [&str; 10] = [
    "T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot",
];
/// Of this many images to learn from, one is held out.
const HELD_OUT: usize = 12;
/// Of this many digits, one is for the test.
const TEST: usize = 5;

/// Grey images of the same size, one after the other, with the number of the label of each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Images {
    pub pixels: Vec<u8>,
    pub labels: Vec<u8>,
}

/// Images in three parts.
#[derive(Debug)]
pub struct Data {
    /// Those to learn.
    pub train: Images,
    /// Those that show during the training how good the weights are.
    pub held_out: Images,
    /// Those that are looked at once, at the end.
    pub test: Images,
    /// The height and the width of an image.
    pub size: [usize; 2],
    /// The names of the labels.
    pub labels: Vec<String>,
    /// Whether the mirror image of one is an image of the same kind.
    pub has_mirror_images: bool,
    /// Where they are from, in words.
    pub origin: String,
    checksum: u32,
}

impl Data {
    /// Reads Fashion-MNIST, or the digits where it is not installed.
    pub fn load() -> Result<Self> {
        let fashion = Path::new(FASHION);
        if fashion.is_dir() {
            let labels = CLOTHES.map(str::to_owned).into();
            let data = Self::read(fashion)?;
            return Ok(Self { labels, has_mirror_images: true, ..data }.named("Fashion-MNIST"));
        }
        Self::digits(&crate::root().join("data/optdigits.csv")).context(
            "there are no images: install Debian's package dataset-fashion-mnist, or give the program a folder with \
             files in the format of MNIST by --data",
        )
    }

    /// Reads the four files of MNIST's format in a folder, which may be compressed by gzip.
    pub fn read(folder: &Path) -> Result<Self> {
        let part = |name: &str| -> Result<(Images, [usize; 2])> {
            let (pixels, size) = idx::read_images(folder, &format!("{name}-images-idx3-ubyte"))?;
            let labels = idx::read_labels(folder, &format!("{name}-labels-idx1-ubyte"))?;
            let (count, area) = (labels.len(), size[0] * size[1]);
            ensure!(
                pixels.len() == count * area,
                "{}: the {name} files have {} images and {count} labels",
                folder.display(),
                pixels.len() / area
            );
            Ok((Images { pixels, labels }, size))
        };
        let ((train, size), (test, other)) = (part("train")?, part("t10k")?);
        ensure!(size == other, "{}: images of {size:?} and of {other:?}", folder.display());
        Self::new(train, test, size, folder.display().to_string())
    }

    /// Reads lines of 64 grey values from 0 to 16 and a digit.
    fn digits(path: &Path) -> Result<Self> {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let (mut train, mut test) = (Images::default(), Images::default());
        for (number, line) in text.lines().enumerate() {
            let bad = || format!("{}:{}: not a digit of 64 pixels", path.display(), number + 1);
            let numbers = line.split(',').map(str::parse).collect::<Result<Vec<u8>, _>>();
            let numbers = numbers.with_context(bad)?;
            let (label, pixels) = numbers.split_last().with_context(bad)?;
            ensure!(pixels.len() == 64 && pixels.iter().all(|pixel| *pixel <= 16), bad());
            let part = if number % TEST == 0 { &mut test } else { &mut train };
            part.pixels.extend(pixels.iter().map(|pixel| pixel * 15));
            part.labels.push(*label);
        }
        Self::new(train, test, [8, 8], "handwritten digits".to_owned())
    }

    /// Holds out a part of the images to learn from.
    pub fn new(all: Images, test: Images, size: [usize; 2], origin: String) -> Result<Self> {
        let parts = [&all.pixels, &all.labels, &test.pixels, &test.labels];
        let checksum = parts.into_iter().fold(0, |sum, bytes| crc32c::crc32c_append(sum, bytes));
        let (mut train, mut held_out) = (Images::default(), Images::default());
        for (number, (image, label)) in
            all.pixels.chunks(size[0] * size[1]).zip(&all.labels).enumerate()
        {
            let part = if number % HELD_OUT == 0 { &mut held_out } else { &mut train };
            part.pixels.extend_from_slice(image);
            part.labels.push(*label);
        }
        let classes = all.labels.iter().max().map_or(0, |most| usize::from(*most) + 1);
        ensure!(classes > 1, "{origin}: at least two different labels are needed");
        let known = test.labels.iter().all(|label| usize::from(*label) < classes);
        ensure!(known, "{origin}: the test has labels that there are none to learn of");
        ensure!(!test.labels.is_empty(), "{origin}: there are no images for the test");
        let labels = (0..classes).map(|label| label.to_string()).collect();
        let data = Self {
            train,
            held_out,
            test,
            size,
            labels,
            has_mirror_images: false,
            origin,
            checksum,
        };
        Ok(data)
    }

    fn named(self, origin: &str) -> Self {
        Self { origin: origin.to_owned(), ..self }
    }

    /// What tells them from other images, wherever they are from.
    pub fn identity(&self) -> String {
        let count = [&self.train, &self.held_out, &self.test].map(|part| part.labels.len());
        format!("{} images with the checksum {:08x}", count.iter().sum::<usize>(), self.checksum)
    }

    /// How many images there are, and where they are from.
    pub fn describe(&self) -> String {
        format!(
            "{} images to learn, {} held out and {} for the test: {}",
            self.train.labels.len(),
            self.held_out.labels.len(),
            self.test.labels.len(),
            self.origin
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn every_image_is_in_one_part_with_its_label() {
        let images = |from: u8, to: u8| Images {
            pixels: (from..to).flat_map(|number| [number; 4]).collect(),
            labels: (from..to).map(|number| number % 3).collect(),
        };
        let data = Data::new(images(0, 60), images(60, 70), [2, 2], String::new()).unwrap();
        let parts = [&data.train, &data.held_out, &data.test];
        assert_eq!(parts.map(|part| part.labels.len()), [55, 5, 10]);
        let mut all = Vec::new();
        for part in parts {
            for (image, label) in part.pixels.chunks(4).zip(&part.labels) {
                assert!(image.iter().all(|pixel| *pixel == image[0]) && image[0] % 3 == *label);
                all.push(image[0]);
            }
        }
        all.sort_unstable();
        assert_eq!(all, (0..70).collect::<Vec<_>>());
        assert_eq!(data.labels, ["0", "1", "2"]);
        let unknown = Images { pixels: vec![0; 4], labels: vec![3] };
        assert!(Data::new(images(0, 60), unknown, [2, 2], String::new()).is_err());
    }

    #[test]
    fn the_digits_of_a_checkout_are_read() {
        let data = Data::digits(&crate::root().join("data/optdigits.csv")).unwrap();
        assert_eq!((data.labels.len(), data.test.labels.len()), (10, 360));
        assert_eq!(data.train.labels.len() + data.held_out.labels.len(), 1437);
    }
}
