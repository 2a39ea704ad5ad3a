//! The chores of this repository: `cargo xtask <command>`.

use std::process::ExitCode;

use anyhow::{Result, bail};
use testbench::{cache, compiled, compiler, paths, process};

use crate::args::Args;

mod args;
mod bench;
mod build_time;
mod bundle;
mod committed;
mod cpu;
mod demo;
mod doctor;
mod fmt;
mod fuzz;
mod layers;
mod libtorch;
mod links;
mod minimum;
mod null_cuda;
mod oracle;
mod package;
mod pictures;
mod planted;
mod recipes;
mod release;
mod sanitize;
mod simulation;
mod source;
mod steps;
mod surface;
mod test;
mod venv;
mod versions;
mod workspace;

const USAGE: &str = "\
usage: cargo xtask <command>

  demo [--tch V] [args...]           trains a small GPT and on handwritten digits with and without mixed
                                     precision; --ranks 2 trains on the digits with two processes
  test [--tch V] [stage]             format, lints, documentation, contents of the package, then every test on the
                                     CPU and on simulated GPUs, and some on CUDA's real host code; or one stage
  test [--tch V] pairs [seconds]     tries random programs that make use of two abilities, for ten minutes by default
  release-check                      minimum Rust version, the packed crate with the oldest dependencies, copies of the
                                     simulated GPUs that arrive at other times, and what libtorch decides with the
                                     other supported versions of tch
  simulate [--tch V] command…        runs any program on two simulated GPUs and prints what it cost them
  null-cuda [--values] command…      runs any program on the real libtorch_cuda without a GPU and prints what its
                                     host code did; with the numbers of the CPU's kernels, or none
  planted [name…]                    plants the faults of tests/planted one by one, and demands that a test fails; all of
                                     them or those whose names have a word in them
  sanitize [args…]                   runs tests with the C++ under address and undefined-behaviour
                                     sanitizers, after planted faults were found; args are those of cargo test
  bench [--tch V] [filter...]        times this crate beside Python and plain tch, on one core; all benchmarks or
                                     those whose names have a filter in them
  build-time [--tch V]               times how long a program that has tch waits for this crate, by feature
  doctor [--tch V]                   says what is here, what is missing and which precision suits this machine
  bundle [--tch V] [--lease]         packs tests, examples and benches for a machine without Rust; or only what a GPU
                                     that is there for a short time is asked in three calls
  fuzz [files] [seconds]             feeds damaged files to the checkpoint readers, for a minute by default; `files`:
                                     only to those of torch-files, without libtorch
  fmt                                formats the Rust and the C++, and puts the pictures into the documentation
  lock                               rewrites xtask/lock from Cargo.lock
  surface                            rewrites xtask/surface.txt, the list of the public items, and counts them
  package [--publishable]            rewrites xtask/package.txt, the list of the package's files; or checks that the
                                     crate can be published, without publishing it

V is a supported version of tch, such as 0.24. The default is the one in Cargo.lock.
libtorch comes from LIBTORCH or LIBTORCH_USE_PYTORCH if set, else from PyPI into the user's cache folder.";

fn main() -> ExitCode {
    // Prints one line, like other errors. A broken pipe, for instance to `head`, needs no message.
    std::panic::set_hook(Box::new(|panic| {
        let message = panic.to_string();
        if !message.contains("Broken pipe") {
            eprintln!("error in xtask itself: {message}");
        }
        std::process::exit(1);
    }));
    match dispatch() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch() -> Result<ExitCode> {
    let mut args = Args::new(std::env::args().skip(1));
    let Some(command) = args.next() else {
        println!("{USAGE}");
        return Ok(ExitCode::SUCCESS);
    };
    match command.as_str() {
        "help" | "--help" | "-h" => println!("{USAGE}"),
        "demo" => demo::run(args)?,
        "test" => test::run(args)?,
        "release-check" => test::check_release(args)?,
        "sanitize" => sanitize::run(args)?,
        "planted" => planted::run(args)?,
        "simulate" => return simulation::run(args),
        "null-cuda" => return null_cuda::run(args),
        "bench" => bench::run(args)?,
        "build-time" => build_time::run(args)?,
        "doctor" => return doctor::run(args),
        "bundle" => bundle::run(args)?,
        "fuzz" => fuzz::run(args)?,
        "lock" => {
            workspace::rewrite_locks(args)?;
            minimum::rewrite(&package::packed()?)?;
        }
        "package" => package::run(args)?,
        "surface" => surface::rewrite_list(args)?,
        "fmt" => fmt::format(args)?,
        unknown => bail!("there is no command `{unknown}`\n\n{USAGE}"),
    }
    Ok(ExitCode::SUCCESS)
}
