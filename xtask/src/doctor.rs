//! `cargo xtask doctor`: what is installed, what is missing, and which precision suits this machine.

use std::fs;
use std::process::{Command, ExitCode};

use anyhow::{Context, Error, Result};

use crate::args::Args;
use crate::cpu::Cpu;
use crate::libtorch::{self, Libtorch, Search};
use crate::versions::{Pair, locked};
use crate::{cache, compiler, paths, process, workspace};

/// What asks Python's torch, so that nothing has to be compiled.
const CUDA: &str = include_str!("doctor/cuda.py");
const SPEED: &str = include_str!("doctor/speed.py");

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
    let default = Pair::locked()?;
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
    cuda(libtorch.as_ref());
    println!("\n{}", cpu().advice());
    println!("\n{BYTES}");
    let python = libtorch.as_ref().and_then(|libtorch| libtorch.python.as_ref());
    if let Some(python) = python
        && let Ok(measured) = process::read(Command::new(python).args(["-c", SPEED]))
    {
        println!("\n{measured}");
    }
    if problems.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    println!("\n`cargo xtask demo` and `cargo xtask test` will not work yet:");
    problems.iter().for_each(|problem| println!("- {problem:#}"));
    Ok(ExitCode::FAILURE)
}

fn say(name: &str, text: &str) {
    println!("{name:13} {text}");
}

fn tch_version(pair: Pair, default: Pair) -> Result<String> {
    let path = match pair == default {
        true => paths::root().join("Cargo.lock"),
        false => workspace::committed_lock(pair),
    };
    Ok(locked(&paths::read(&path)?, "tch").context("the lock has no tch")?.to_owned())
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
    match compiler::version() {
        Ok(version) => say("C++ compiler", &version),
        Err(error) => {
            say("C++ compiler", "missing: see below");
            problems.push(error);
        }
    }
}

fn python(libtorch: Option<&Libtorch>) {
    let Some(libtorch) = libtorch else { return };
    let Some(python) = &libtorch.python else {
        say("Python", "none has this torch: the tests that compare with Python will be skipped");
        say("", "to have them, set TCH_AMP_PYTHON to one that has it, or unset LIBTORCH");
        return;
    };
    let version = process::first_line(Command::new(python).arg("--version"));
    let version = version.unwrap_or_else(|| "does not run".into());
    say("Python", &format!("{version} with the same torch: {}", python.display()));
}

fn cuda(libtorch: Option<&Libtorch>) {
    match libtorch.map(Libtorch::has_cuda) {
        Some(true) => say("CUDA", "built into this libtorch"),
        Some(false) => {
            return say("CUDA", "not built into this libtorch: there is no libtorch_cuda.so");
        }
        None => {}
    }
    if let Some(python) = libtorch.and_then(|libtorch| libtorch.python.as_ref()) {
        match process::read(Command::new(python).args(["-c", CUDA])) {
            Ok(says) => says.lines().for_each(|line| say("", line)),
            Err(error) => say("", &format!("not usable here: {error:#}")),
        }
        return;
    }
    // Whether libtorch can use the devices of the driver is unknown.
    let Ok(gpus) = process::read(Command::new("nvidia-smi").arg("-L")) else {
        return say("CUDA devices", "none: nvidia-smi does not run");
    };
    gpus.lines().for_each(|gpu| say("", gpu));
    say("", "as the driver says; whether libtorch can use it only Python's torch can tell:");
    say("", "run `cargo xtask test` once without LIBTORCH, or set TCH_AMP_PYTHON");
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What functions of the scripts return in Python.
    fn evaluated(expression: &str) -> String {
        let folder = paths::root().join("xtask/src/doctor");
        let code = format!("import cuda, speed; print({expression})");
        let mut python = Command::new("python3");
        process::read(python.args(["-B", "-c", &code]).current_dir(folder)).unwrap()
    }

    #[test]
    fn fp16_is_fast_one_generation_before_bf16() {
        for (capability, says) in [
            ("(6, 1)", "no tensor cores"),
            ("(7, 5)", "tensor cores for fp16: with a GradScaler"),
            ("(8, 0)", "tensor cores for fp16 and bf16"),
        ] {
            let described = evaluated(&format!("cuda.described(0, 'GPU', {capability})"));
            assert!(described.contains(says), "{described}");
        }
    }

    #[test]
    fn the_advice_says_from_which_width_on_a_dtype_pays() {
        for (ratios, sentence) in [
            (
                "[(64, 1.1), (256, 3.0), (1024, 4.3)]",
                "bf16: 4.3x as fast as f32 at 1024, 1.1x at 64: use it for layers wider than about 64.",
            ),
            (
                "[(64, 2.0), (1024, 4.3)]",
                "bf16: 4.3x as fast as f32 at 1024, 2.0x at 64: use it for layers of every width.",
            ),
            // Noise.
            (
                "[(64, 2.0), (256, 1.1), (1024, 4.3)]",
                "bf16: 4.3x as fast as f32 at 1024, 2.0x at 64: use it for layers wider than about 256.",
            ),
            ("[(64, 0.04)]", "bf16: 0.04x as fast as f32 at 64: do not use it here for its speed."),
        ] {
            assert_eq!(evaluated(&format!("speed.advice('bf16', {ratios})")), sentence);
        }
    }

    #[test]
    fn slow_operators_are_named() {
        let rows = "[('linear', [0.5, 1.2, 3]), ('lstm', [None] * 3), ('sdpa, causal', [1.5, 1, 0.9]), \
                     ('gelu of half', [1.5, 1.5, 1.4])]";
        let text = evaluated(&format!("speed.table({rows})"));
        assert!(text.contains("sizes: linear, lstm, sdpa.\n"), "{text}");
        assert!(text.contains("keep_in_f32([\"linear\"])"), "{text}");
        let fast = evaluated("speed.table([('bmm', [1, 2, 3])])");
        assert!(fast.ends_with("None of them is slower in bf16."), "{fast}");
    }
}
