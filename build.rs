//! Compiles `csrc/` against the libtorch that torch-sys found and links it into whatever depends on this crate.

use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};

/// The libtorch versions that the range of `tch` in Cargo.toml pairs with.
const OLDEST: (u32, u32) = (2, 11);
const NEWEST: (u32, u32) = (2, 13);

/// What takes longest to compile comes first.
const SOURCES: &[&str] = &[
    "kernel_updates.cpp",
    "function.cpp",
    "arithmetic.cpp",
    "autocast.cpp",
    "average.cpp",
    "batches.cpp",
    "checkpoint.cpp",
    "clip.cpp",
    "comparison.cpp",
    "device.cpp",
    "device_memory.cpp",
    "exponents.cpp",
    "gradients.cpp",
    "heap.cpp",
    "history.cpp",
    "insight.cpp",
    "kernel_composed.cpp",
    "kernel_gradients.cpp",
    "kernel_masters.cpp",
    "kernel_muon.cpp",
    "leaves.cpp",
    "loss_scale.cpp",
    "masters.cpp",
    "memory.cpp",
    "numbers.cpp",
    "optim.cpp",
    "optim_composed.cpp",
    "optim_cpu.cpp",
    "optim_device.cpp",
    "optim_muon.cpp",
    "optim_state.cpp",
    "overrides.cpp",
    "pieces.cpp",
    "recorded_tensors.cpp",
    "recorder.cpp",
    "recording.cpp",
    "renewal.cpp",
    "rounding.cpp",
    "scale.cpp",
    "schemas.cpp",
    "spikes.cpp",
    "stand_ins.cpp",
    "testing.cpp",
    "timing.cpp",
    "unscale.cpp",
    "widened.cpp",
];

/// The sources of the feature `distributed`.
const DISTRIBUTED: &[&str] = &[
    "distributed_group.cpp",
    "distributed_nccl.cpp",
    "distributed_random.cpp",
    "distributed_reducer.cpp",
    "distributed_spawn.cpp",
    "distributed_store.cpp",
];

/// The loops of csrc/kernel_*.cpp become vector code only with these, and round as libtorch's only without contraction.
const FLAGS: [&str; 4] =
    ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"];

/// What finds reads and writes outside of memory, leaks and undefined behaviour. The virtual tables of libtorch's classes
/// are not ours to check.
const SANITIZE: [&str; 5] = [
    "-fsanitize=address,undefined",
    "-fno-sanitize=vptr",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-g1",
];

fn main() {
    println!("cargo:rustc-check-cfg=cfg(tamp_testing)");
    if env::var_os("CARGO_FEATURE_DOC_ONLY").is_some() {
        return;
    }
    if let Err(error) = Libtorch::find().and_then(|libtorch| libtorch.build()) {
        eprintln!("\ntch-amp: {error:#}\n");
        std::process::exit(1);
    }
}

struct Libtorch {
    lib: PathBuf,
    include: PathBuf,
}

impl Libtorch {
    fn find() -> Result<Self> {
        let lib = PathBuf::from(env::var_os("DEP_TCH_LIBTORCH_LIB").context(
            "torch-sys does not say where libtorch is, which it does on Linux and macOS only; \
             this crate builds on those",
        )?);
        let include = match variable("LIBTORCH_INCLUDE") {
            Some(root) if variable("LIBTORCH_USE_PYTORCH").is_none() => {
                PathBuf::from(root).join("include")
            }
            _ => lib.join("../include"),
        };
        ensure!(
            include.join("ATen/ATen.h").is_file(),
            "no ATen/ATen.h in {}. Set LIBTORCH_INCLUDE to the folder that holds `include`, \
             or LIBTORCH to a whole libtorch",
            include.display()
        );
        let found = Self { lib, include };
        found.check_version()?;
        Ok(found)
    }

    fn check_version(&self) -> Result<()> {
        let header = ["torch/headeronly/version.h", "torch/csrc/api/include/torch/version.h"]
            .iter()
            .find_map(|name| fs::read_to_string(self.include.join(name)).ok())
            .with_context(|| format!("no torch version.h in {}", self.include.display()))?;
        let found = (number(&header, "MAJOR")?, number(&header, "MINOR")?);
        // The lists of autocast differ between versions.
        println!("cargo:rustc-env=TAMP_LIBTORCH={}.{}", found.0, found.1);
        if variable("LIBTORCH_BYPASS_VERSION_CHECK").is_none()
            && !(OLDEST..=NEWEST).contains(&found)
        {
            bail!(
                "libtorch {}.{} is not supported (2.11 to 2.13 are). Set LIBTORCH to a libtorch \
                 of the version that your tch wants, or LIBTORCH_BYPASS_VERSION_CHECK=1 to try",
                found.0,
                found.1
            );
        }
        Ok(())
    }

    fn has_cuda(&self) -> bool {
        self.lib.join("libtorch_cuda.so").exists()
    }

    fn build(&self) -> Result<()> {
        let out = env::var("OUT_DIR").context("cargo sets OUT_DIR")?;
        let abi = variable("LIBTORCH_CXX11_ABI").unwrap_or_else(|| "1".to_owned());
        // For `cargo xtask sanitize`.
        let sanitized = variable("TCH_AMP_SANITIZE").is_some();
        let mut shim = cc::Build::new();
        shim.cpp(true)
            .std("c++17")
            .pic(true)
            .cargo_metadata(false)
            .warnings(true)
            .extra_warnings(true)
            // Half of the compiler's time otherwise: only the sanitizers' reports name lines.
            .debug(sanitized)
            .opt_level(if sanitized { 1 } else { 3 })
            .warnings_into_errors(variable("TCH_AMP_DENY_WARNINGS").is_some())
            .define("_GLIBCXX_USE_CXX11_ABI", abi.as_str());
        // System headers: their warnings are not ours.
        for include in [self.include.clone(), self.include.join("torch/csrc/api/include")] {
            shim.flag("-isystem").flag(&include);
        }
        for flag in FLAGS {
            shim.flag(flag);
        }
        if self.has_cuda() {
            shim.define("TAMP_WITH_CUDA", None);
        }
        // Hooks for this crate's own tests, which cargo builds with the profile that a user's debug build has, too:
        // such a build carries two functions more, and a counter that nothing sets. No release build has them. The cfg,
        // and not debug_assertions, which a profile may set otherwise, tells the Rust side.
        if env::var("PROFILE").is_ok_and(|profile| profile == "debug") {
            shim.define("TAMP_TESTING", None);
            println!("cargo:rustc-cfg=tamp_testing");
        }
        if sanitized {
            SANITIZE.iter().for_each(|flag| {
                shim.flag(flag);
            });
        }
        add_sources(&mut shim);
        println!("cargo:rerun-if-changed=csrc");
        let precompiled = precompile(&mut shim, Path::new(&out));
        let compiled = shim.try_compile("tamp");
        // Hundreds of megabytes that nothing needs any more.
        drop(precompiled.map(fs::remove_file));
        compiled.context(
            "cannot compile csrc/. A C++17 compiler is needed: install g++ or clang++, \
             or set CXX to one",
        )?;
        self.link(&out);
        if sanitized {
            println!("cargo:rustc-link-lib=dylib=asan");
            println!("cargo:rustc-link-lib=dylib=ubsan");
        }
        Ok(())
    }

    fn link(&self, out: &str) {
        // Whole, or the object that keeps libtorch_cuda linked would be left out (see csrc/device.cpp).
        println!("cargo:rustc-link-search=native={out}");
        println!("cargo:rustc-link-lib=static:+whole-archive=tamp");
        println!("cargo:rustc-link-search=native={}", self.lib.display());
        if self.has_cuda() {
            println!("cargo:rustc-link-lib=torch_cuda");
        }
        println!("cargo:rustc-link-lib=torch_cpu");
        println!("cargo:rustc-link-lib=c10");
        let stdlib = if cfg!(target_os = "macos") { "c++" } else { "stdc++" };
        println!("cargo:rustc-link-lib={stdlib}");
        // Tests and examples of this crate find libtorch without LD_LIBRARY_PATH.
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", self.lib.display());
        println!("cargo:libtorch_lib={}", self.lib.display());
    }
}

fn add_sources(shim: &mut cc::Build) {
    let mut sources = SOURCES.to_vec();
    if env::var_os("CARGO_FEATURE_DISTRIBUTED").is_some() {
        // After libtorch's own headers, because some libtorch may have gloo's as well.
        shim.flag("-isystem").flag("csrc/gloo_headers");
        sources.extend(DISTRIBUTED);
    }
    shim.files(sources.iter().map(|source| Path::new("csrc").join(source)));
}

/// Compiles ATen.h once for all sources: parsing it takes three quarters of the time that compiling one of them does.
/// Returns the file that is no longer needed afterwards. Without it, or where the compiler cannot use it, every source
/// parses the header itself, as all do under `TCH_AMP_PRECOMPILE=0`, which lets a compiler cache recognize each source.
fn precompile(shim: &mut cc::Build, out: &Path) -> Option<PathBuf> {
    if variable("TCH_AMP_PRECOMPILE").is_some_and(|value| value == "0") {
        return None;
    }
    let (header, precompiled) = (out.join("precompiled.h"), out.join("precompiled.h.gch"));
    fs::write(&header, "#include <ATen/ATen.h>\n").ok()?;
    let mut compiler = shim.try_get_compiler().ok()?.to_command();
    compiler.args(["-x", "c++-header"]).arg(&header).arg("-o").arg(&precompiled);
    if !compiler.status().ok()?.success() {
        drop(fs::remove_file(&precompiled));
        return None;
    }
    shim.flag("-include").flag(&header);
    Some(precompiled)
}

fn variable(name: &str) -> Option<String> {
    println!("cargo:rerun-if-env-changed={name}");
    env::var(name).ok()
}

fn number(header: &str, part: &str) -> Result<u32> {
    let name = format!("#define TORCH_VERSION_{part} ");
    header
        .lines()
        .find_map(|line| line.strip_prefix(name.as_str()))
        .and_then(|value| value.trim().parse().ok())
        .with_context(|| format!("libtorch's version.h has no TORCH_VERSION_{part}"))
}
