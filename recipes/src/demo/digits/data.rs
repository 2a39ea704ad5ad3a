//! The handwritten digits, read from `data`.

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use tch::data::Iter2;
use tch::{Device, Tensor};

const PIXELS: usize = 64;
const DARKEST: u8 = 16;
/// The number of images in a batch.
pub const BATCH: i64 = 64;
const HELD_OUT: usize = 360;
const IMAGES: i64 = 1797;
/// Coprime to the number of images and near its golden section: steps of this size visit every image once and spread
/// consecutive images evenly over the file, and so over its writers and digits.
const STRIDE: i64 = 1111;

/// Images of shape `[n, 1, 8, 8]` with values in `0..=1`, and their digits.
#[derive(Debug)]
pub struct Split {
    /// The pixels, f32.
    pub images: Tensor,
    /// The digits, i64.
    pub labels: Tensor,
}

impl Split {
    /// The number of full batches in one pass.
    pub fn batches(&self) -> usize {
        (self.labels.numel() as i64 / BATCH) as usize
    }

    /// Returns the batches of one pass, in a new random order.
    pub fn shuffled(&self, device: Device) -> Iter2 {
        let mut batches = Iter2::new(&self.images, &self.labels, BATCH);
        batches.shuffle().to_device(device);
        batches
    }
}

/// The data set, with a fixed split.
#[derive(Debug)]
pub struct Digits {
    /// 1,437 images.
    pub train: Split,
    /// 360 images that are not used in training.
    pub test: Split,
}

impl Digits {
    /// Reads the file and splits it, the same way for every seed of the training.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let (images, labels) = parse(&text).with_context(|| path.display().to_string())?;
        ensure!(labels.size1()? == IMAGES, "{} images instead of {IMAGES}", labels.size1()?);
        let order: Vec<i64> = (0..IMAGES).map(|index| index * STRIDE % IMAGES).collect();
        let part = |indices: &[i64]| {
            let indices = Tensor::from_slice(indices);
            Split {
                images: images.index_select(0, &indices),
                labels: labels.index_select(0, &indices),
            }
        };
        let (test, train) = order.split_at(HELD_OUT);
        Ok(Self { train: part(train), test: part(test) })
    }
}

/// Returns the path of the data.
pub fn default_path() -> PathBuf {
    crate::root().join("data/optdigits.csv")
}

fn parse(text: &str) -> Result<(Tensor, Tensor)> {
    let mut pixels = Vec::new();
    let mut labels = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let (image, label) = parse_line(line).with_context(|| format!("line {}", index + 1))?;
        pixels.extend(image.into_iter().map(|pixel| f32::from(pixel) / f32::from(DARKEST)));
        labels.push(i64::from(label));
    }
    Ok((Tensor::from_slice(&pixels).view([-1, 1, 8, 8]), Tensor::from_slice(&labels)))
}

fn parse_line(line: &str) -> Result<(Vec<u8>, u8)> {
    let mut image =
        line.split(',').map(|number| number.trim().parse()).collect::<Result<Vec<u8>, _>>()?;
    ensure!(image.len() == PIXELS + 1, "{} numbers instead of {}", image.len(), PIXELS + 1);
    let label = image.pop().context("an empty line")?;
    ensure!(label < 10 && image.iter().all(|&pixel| pixel <= DARKEST), "a number out of range");
    Ok((image, label))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use tch::Kind;

    #[test]
    fn the_split_holds_every_image_once() {
        let digits = Digits::load(&default_path()).unwrap();
        assert_eq!(digits.train.images.size(), [1437, 1, 8, 8]);
        assert_eq!(digits.test.images.size(), [360, 1, 8, 8]);
        assert_eq!(digits.train.batches(), 22);
        let file = parse(&std::fs::read_to_string(default_path()).unwrap()).unwrap();
        let sum = |images: &Tensor| images.sum(Kind::Double).double_value(&[]);
        assert_eq!(sum(&digits.train.images) + sum(&digits.test.images), sum(&file.0));
        let digits_in = |labels: &Tensor| labels.bincount(None::<&Tensor>, 10);
        assert_eq!(
            digits_in(&digits.train.labels) + digits_in(&digits.test.labels),
            digits_in(&file.1)
        );
    }

    #[test]
    fn a_broken_line_is_named() {
        let good = format!("{}3", "0,".repeat(PIXELS));
        for bad in [
            "1,2,3",
            &good.replace('3', "10"),
            &good.replacen('0', "17", 1),
            &good.replacen('0', "x", 1),
        ] {
            let error = parse(&format!("{good}\n{bad}")).unwrap_err().to_string();
            assert_eq!(error, "line 2", "{bad}");
        }
    }
}
