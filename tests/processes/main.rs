//! Runs of whole programs, in processes of their own: ranks, kills, resumed runs, examples, recipes.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    reason = "a test fails by panicking"
)]

mod demo;
mod distributed;
mod examples;
mod recipe;
mod resume;
