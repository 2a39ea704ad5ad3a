//! `cargo xtask doctor`: what is installed, what is missing, and which precision suits this machine.

use std::fs;
use std::process::{Command, ExitCode};

use anyhow::{Context, Error, Result};

use crate::advice::advice;
use crate::args::Args;
use crate::cpu::Cpu;
use crate::libtorch::{self, Libtorch, Search};
use crate::versions::{Pair, locked};
use crate::{cache, compiler, paths, process, workspace};

mod cuda;
mod operators;
mod speed;

/// What `tests/master_memory.rs` measures.
const BYTES: &str = "bytes per parameter under AdamW, its gradient included:
  f32 16, with optim::MomentDtype::BFloat16 12, with MomentDtype::EightBit 10.03
  bf16 with MasterWeights::Remainder 14, with MomentDtype::BFloat16 10, with MomentDtype::EightBit 8.03";

/// Problems that prevent `demo` and `test` from working.
type Problems = Vec<Error>;

/// `cargo xtask doctor`. Downloads and compiles nothing. Exits with 1 if something is missing.
pub(crate) fn run(mut args: Args) -> Result<ExitCode> {
    let asked = args.tch()?;
    args.end()?;
    let default = Pair::locked(&paths::root())?;
    let pair = asked.unwrap_or(default);
    let mut problems = Problems::new();
    say("tch", &format!("{}, which needs libtorch {}", tch_version(pair, default)?, pair.libtorch));
    // Every supported version has this defect.
    say("", "its Tensor::from_slice takes half::bf16 for fp16: use tch_amp::half::from_slice");
    let libtorch = libtorch(pair, default, &mut problems);
    compiler(&mut problems);
    python(libtorch.as_ref());
    let cache = cache::dir()?;
    say("disk", &format!("{} GB free for {}", cache::free_gb(&cache)?, cache.display()));
    let gpus = cuda::examine(libtorch.as_ref());
    let cpu = cpu();
    println!("\n{}", advice(&cpu, &gpus));
    println!("\n{BYTES}");
    let python = libtorch.as_ref().and_then(|libtorch| libtorch.python.as_ref());
    if let Some(measured) = python.and_then(|python| speed::advice(python)) {
        println!("\nMeasured on the CPU, by matrix products:\n{measured}");
    }
    if let Some(measured) = python.and_then(|python| operators::table(python)) {
        println!("\n{measured}");
    }
    Ok(verdict(&problems))
}

fn say(name: &str, text: &str) {
    println!("{name:13} {text}");
}

fn tch_version(pair: Pair, default: Pair) -> Result<String> {
    let path = match pair == default {
        true => paths::root().join("Cargo.lock"),
        false => workspace::committed_lock(pair),
    };
    let lock = fs::read_to_string(&path).with_context(|| format!("no {}", path.display()))?;
    let version = locked(&lock, "tch").context("the lock has no tch")?;
    Ok(version.to_owned())
}

fn libtorch(pair: Pair, default: Pair, problems: &mut Problems) -> Option<Libtorch> {
    match libtorch::search(pair, default) {
        Ok(Search::Found(libtorch)) => {
            say("libtorch", &format!("{} in {}", libtorch.version, libtorch.root.display()));
            say("", &format!("found by: {}", libtorch.rule.reason()));
            return Some(libtorch);
        }
        Ok(Search::Absent(venv)) => {
            say("libtorch", "not here yet: `cargo xtask demo` and `cargo xtask test` download it");
            say("", &format!("once, 5 GB with CUDA, into {}", venv.dir.display()));
            problems.extend(venv.check_can_be_made().err());
        }
        Err(error) => {
            say("libtorch", "not usable: see below");
            problems.push(error);
        }
    }
    None
}

fn compiler(problems: &mut Problems) {
    match compiler::cxx() {
        Ok(version) => say("C++ compiler", &version),
        Err(error) => {
            say("C++ compiler", "missing: see below");
            problems.push(error);
        }
    }
}

fn python(libtorch: Option<&Libtorch>) {
    let Some(libtorch) = libtorch else {
        return;
    };
    let Some(python) = &libtorch.python else {
        say("Python", "none has this torch: the tests that compare with Python will be skipped");
        say("", "to have them, set TCH_AMP_PYTHON to one that has it, or unset LIBTORCH");
        return;
    };
    let version = process::first_line(Command::new(python).arg("--version"));
    let version = version.unwrap_or_else(|| "does not run".into());
    say("Python", &format!("{version} with the same torch: {}", python.display()));
}

fn cpu() -> Cpu {
    let cpu = Cpu::parse(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default());
    say("CPU", cpu.model.as_deref().unwrap_or("unknown"));
    for (name, instructions) in [("  bf16", &cpu.bf16), ("  fp16", &cpu.fp16)] {
        match instructions[..] {
            [] => say(name, "works, but slow: emulated, as the CPU has no instructions for it"),
            _ => say(name, &format!("works, and fast: {}", instructions.join(", "))),
        }
    }
    cpu
}

fn verdict(problems: &Problems) -> ExitCode {
    if problems.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("\n`cargo xtask demo` and `cargo xtask test` will not work yet:");
    for problem in problems {
        println!("- {problem:#}");
    }
    ExitCode::FAILURE
}
