//! Precision policies: what they cast, their text form, and models under a policy.

mod casts;
mod modules;
mod run;
mod text;
mod training;
mod variables;

use tch::Kind;

/// All dtypes that tch has and that libtorch can fill.
const KINDS: [Kind; 16] = [
    Kind::Uint8,
    Kind::Int8,
    Kind::Int16,
    Kind::Int,
    Kind::Int64,
    Kind::Half,
    Kind::Float,
    Kind::Double,
    Kind::ComplexHalf,
    Kind::ComplexFloat,
    Kind::ComplexDouble,
    Kind::Bool,
    Kind::BFloat16,
    Kind::Float8e5m2,
    Kind::Float8e4m3fn,
    Kind::Float8e5m2fnuz,
];

/// The dtypes that a policy may have.
const POLICY_KINDS: [Kind; 4] = [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double];

fn is_floating(kind: Kind) -> bool {
    let float8 = [Kind::Float8e5m2, Kind::Float8e4m3fn, Kind::Float8e5m2fnuz];
    POLICY_KINDS.contains(&kind) || float8.contains(&kind)
}
