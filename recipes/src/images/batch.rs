//! Batches: views of images that stay on the device, and channels-last.

use super::data::{Data, Images};
use tch::{Device, Kind, Tensor};

/// Images on the device of the model, as bytes with a border of zeros.
#[derive(Debug)]
pub struct Pictures {
    /// All pixels, in one dimension.
    pixels: Tensor,
    labels: Tensor,
    count: usize,
    /// The height and the width without the border.
    size: [i64; 2],
    /// The width of the border, by which augmentation moves an image at most.
    border: i64,
    /// The mean and the standard deviation of the pixels to learn from.
    scale: [f64; 2],
    /// The place of each pixel of an image, relative to its first one: a part for the row and one for the column.
    rows: Tensor,
    columns: Tensor,
}

/// What is taken from an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Its number.
    pub image: usize,
    /// How far it is moved down and to the right; negative: up and to the left.
    pub moved: [i64; 2],
    pub is_mirrored: bool,
}

/// Images of the same size and their labels, on the device.
#[derive(Debug)]
pub struct Batch {
    /// Of the shape `[n, 1, height, width]`, in f32, with the mean 0 and the deviation 1.
    pub images: Tensor,
    pub labels: Tensor,
}

/// The three parts of the data on a device.
#[derive(Debug)]
pub struct Set {
    pub train: Pictures,
    pub held_out: Pictures,
    pub test: Pictures,
}

impl Set {
    /// Copies all images to a device, with a border for the augmentation.
    pub fn new(data: &Data, border: i64, device: Device) -> Self {
        let scale = scale(&data.train.pixels);
        let [height, width] = data.size.map(|size| size as i64);
        let part = |images, border| Pictures::new(images, [height, width], border, scale, device);
        let (train, held_out) = (part(&data.train, border), part(&data.held_out, 0));
        Self { train, held_out, test: part(&data.test, 0) }
    }
}

impl Pictures {
    fn new(
        images: &Images,
        [height, width]: [i64; 2],
        border: i64,
        scale: [f64; 2],
        device: Device,
    ) -> Self {
        let count = images.labels.len();
        let pixels = Tensor::from_slice(&images.pixels).view([-1, height, width]);
        let pixels = pixels.constant_pad_nd([border; 4]).view([-1]).to_device(device);
        let labels = Tensor::from_slice(&images.labels).to_kind(Kind::Int64).to_device(device);
        let numbers = |count| Tensor::arange(count, (Kind::Int64, device));
        let rows = (numbers(height) * (width + 2 * border)).view([1, -1, 1]);
        let columns = numbers(width).view([1, 1, -1]);
        Self { pixels, labels, count, size: [height, width], border, scale, rows, columns }
    }

    /// How far an image can be moved.
    pub fn border(&self) -> i64 {
        self.border
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Takes these views of images, without waiting for what a GPU still has to do.
    pub fn take(&self, views: &[View]) -> Batch {
        let ([height, width], border) = (self.size, self.border);
        let line = width + 2 * border;
        let area = (height + 2 * border) * line;
        // For each view the place of its first pixel, the step from one column to the next, and the image.
        let mut places = Vec::with_capacity(3 * views.len());
        for View { image, moved: [down, right], is_mirrored } in views {
            // What is moved down begins with a part of the border above it.
            let first = *image as i64 * area + (border - down) * line + border - right;
            places.push(if *is_mirrored { first + width - 1 } else { first });
        }
        places.extend(views.iter().map(|view| if view.is_mirrored { -1 } else { 1 }));
        places.extend(views.iter().map(|view| view.image as i64));
        let device = self.pixels.device();
        let places = Tensor::from_slice(&places).to_device_(device, Kind::Int64, true, false);
        let places = places.view([3, -1, 1, 1]);
        let index = places.get(0) + &self.rows + places.get(1) * &self.columns;
        let pixels = self.pixels.index_select(0, &index.view([-1])).to_kind(Kind::Float);
        let [mean, deviation] = self.scale;
        let pixels = (pixels - mean) / deviation;
        // With a single channel, the same memory is channels-first and channels-last. These strides are channels-last.
        let images = pixels.view([-1, height, width, 1]).permute([0, 3, 1, 2]);
        Batch { images, labels: self.labels.index_select(0, &places.get(2).view([-1])) }
    }

    /// The numbers of all images from first to last, in batches of `count`. The last one begins anew where they end.
    pub fn in_order(&self, count: usize) -> impl Iterator<Item = Vec<View>> {
        let view =
            move |place| View { image: place % self.len(), moved: [0; 2], is_mirrored: false };
        (0..self.len()).step_by(count).map(move |start| (start..start + count).map(view).collect())
    }
}

/// Lays out a tensor of four dimensions channels-last: the channels of a pixel are next to each other.
pub fn channels_last(tensor: &Tensor) -> Tensor {
    tensor.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
}

/// The mean and the standard deviation of bytes.
fn scale(bytes: &[u8]) -> [f64; 2] {
    let mut counts = [0_u64; 256];
    bytes.iter().for_each(|byte| counts[usize::from(*byte)] += 1);
    let sum = |term: &dyn Fn(f64) -> f64| {
        counts
            .iter()
            .enumerate()
            .map(|(byte, count)| term(byte as f64) * *count as f64)
            .sum::<f64>()
    };
    let count = bytes.len().max(1) as f64;
    let mean = sum(&|byte| byte) / count;
    let deviation = (sum(&|byte| (byte - mean).powi(2)) / count).sqrt();
    // Images of one colour stay finite.
    [mean, if deviation > 0.0 { deviation } else { 1.0 }]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    const SIZE: [i64; 2] = [3, 4];

    /// Two images whose pixels are all different and not zero.
    fn pictures(border: i64) -> Pictures {
        let images = Images { pixels: (1..=24).collect(), labels: vec![7, 8] };
        Pictures::new(&images, SIZE, border, [0.0, 1.0], Device::Cpu)
    }

    #[test]
    fn a_view_is_moved_and_mirrored_and_what_comes_in_is_zero() {
        let pictures = pictures(2);
        for (image, down, right, is_mirrored) in
            [(0, 0, 0, false), (1, 1, -2, false), (1, -2, 1, true), (0, 2, 2, true)]
        {
            let view = View { image, moved: [down, right], is_mirrored };
            let batch = pictures.take(&[view]);
            assert_eq!(batch.labels, Tensor::from_slice(&[7 + image as i64]));
            let pixel = |row: i64, column: i64| {
                let column = if is_mirrored { SIZE[1] - 1 - column } else { column };
                let (row, column) = (row - down, column - right);
                let is_inside = (0..SIZE[0]).contains(&row) && (0..SIZE[1]).contains(&column);
                let value = 1 + image as i64 * 12 + row * SIZE[1] + column;
                if is_inside { value as f64 } else { 0.0 }
            };
            for row in 0..SIZE[0] {
                for column in 0..SIZE[1] {
                    let found = batch.images.double_value(&[0, 0, row, column]);
                    assert_eq!(found, pixel(row, column), "{view:?}: {row} {column}");
                }
            }
        }
    }

    #[test]
    fn images_are_scaled_in_order_and_channels_last() {
        let bytes = [0, 0, 10, 10];
        assert_eq!(scale(&bytes), [5.0, 5.0]);
        assert_eq!(scale(&[4, 4]), [4.0, 1.0]);
        let pictures = Pictures { scale: [5.0, 2.0], ..pictures(0) };
        let views: Vec<_> = pictures.in_order(3).collect();
        assert_eq!(views.len(), 1);
        let batch = pictures.take(&views[0]);
        assert_eq!(batch.labels, Tensor::from_slice(&[7_i64, 8, 7]));
        assert_eq!(batch.images.double_value(&[0, 0, 0, 0]), -2.0);
        assert_eq!(batch.images.stride(), [12, 1, 4, 1]);
        let wide = Tensor::zeros([2, 5, 3, 4], (Kind::Float, Device::Cpu));
        assert_eq!(channels_last(&wide).stride(), [60, 1, 20, 5]);
    }
}
