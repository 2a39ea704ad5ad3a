//! The data: eight Gaussians on a ring, and how well points cover them.

use tch::{Device, Kind, Tensor};

/// The number of Gaussians.
pub const MODES: i64 = 8;
/// The radius of the ring.
pub const RADIUS: f64 = 2.0;
/// The standard deviation of each mode.
const SIGMA: f64 = 0.2;

/// The centres of the modes, a row each.
pub fn centres(device: Device) -> Tensor {
    let angles =
        Tensor::arange(MODES, (Kind::Float, device)) * (std::f64::consts::TAU / MODES as f64);
    Tensor::stack(&[angles.cos(), angles.sin()], 1) * RADIUS
}

/// Points of the data.
pub fn reals(centres: &Tensor, count: i64) -> Tensor {
    let mode = Tensor::randint(MODES, [count], (Kind::Int64, centres.device()));
    let noise = Tensor::randn([count, 2], (Kind::Float, centres.device()));
    centres.index_select(0, &mode) + noise * SIGMA
}

/// The mean and the second moments of points.
pub fn moments(points: &Tensor) -> Tensor {
    let points = points.to_kind(Kind::Float);
    // A sum of products rather than a matrix product, which the region would round.
    let second = (points.unsqueeze(1) * points.unsqueeze(2)).view([-1, 4]);
    Tensor::cat(&[points, second], 1).mean_dim(0, false, Kind::Float)
}

/// How many modes have at least half of their share of the points, and the share of points that are within three
/// standard deviations of a mode.
pub fn coverage(points: &Tensor, centres: &Tensor) -> (f64, f64) {
    let differences = points.to_kind(Kind::Float).unsqueeze(1) - centres.unsqueeze(0);
    let squares = differences.square().sum_dim_intlist(-1, false, Kind::Float);
    let shares =
        squares.le((3.0 * SIGMA).powi(2)).to_kind(Kind::Float).mean_dim(0, false, Kind::Float);
    let covered = shares.ge(0.5 / MODES as f64).sum(Kind::Float);
    (covered.double_value(&[]), shares.sum(Kind::Float).double_value(&[]))
}
