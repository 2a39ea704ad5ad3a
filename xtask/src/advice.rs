//! Recommends a precision for a machine, in plain words.

use crate::cpu::Cpu;
use crate::gpu::Gpu;

/// Advice for training on `gpus`, all of which libtorch can use, and on `cpu`.
pub(crate) fn advice(cpu: &Cpu, gpus: &[Gpu]) -> String {
    match gpus.first() {
        Some(gpu) => format!("{} {}", on_cuda(gpu), on_cpu(cpu)),
        None => on_cpu(cpu).to_owned(),
    }
}

fn on_cuda(gpu: &Gpu) -> &'static str {
    match (gpu.has_fast_fp16(), gpu.has_fast_bf16()) {
        (_, true) => {
            "On CUDA both bf16 autocast and fp16 autocast should be faster than fp32: bf16 needs no \
             GradScaler, fp16 does."
        }
        (true, false) => {
            "On CUDA fp16 autocast with a GradScaler should be faster than fp32; bf16 has no tensor \
             cores on this GPU."
        }
        (false, false) => {
            "This GPU has no tensor cores: autocast saves memory there and hardly any time."
        }
    }
}

fn on_cpu(cpu: &Cpu) -> &'static str {
    match (cpu.bf16.is_empty(), cpu.fp16.is_empty()) {
        (false, false) => {
            "On the CPU both bf16 autocast and fp16 autocast should be faster than fp32; bf16, the \
             default there, needs no GradScaler."
        }
        (false, true) => {
            "On the CPU bf16 autocast should be faster than fp32; fp16 is far slower on this CPU: \
             keep it for CUDA."
        }
        (true, false) => {
            "On the CPU fp16 autocast with a GradScaler should be faster than fp32; bf16 is \
             emulated on this CPU."
        }
        (true, true) => {
            "On the CPU stay with fp32: this one emulates both bf16 and fp16, which is slower. Use \
             autocast there only to try out what will run on CUDA."
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(bf16: bool, fp16: bool) -> Cpu {
        let some = |yes, name| if yes { vec![name] } else { Vec::new() };
        Cpu { model: None, bf16: some(bf16, "amx_bf16"), fp16: some(fp16, "amx_fp16") }
    }

    fn gpu(major: u64) -> Gpu {
        Gpu { name: "GPU".into(), capability: (major, 0) }
    }

    #[test]
    fn without_a_gpu_the_advice_is_only_about_the_cpu() {
        let text = advice(&cpu(true, false), &[]);
        assert!(text.contains("bf16 autocast should be faster than fp32"), "{text}");
        assert!(text.contains("fp16 is far slower"), "{text}");
        assert!(!text.contains("On CUDA"), "{text}");
    }

    #[test]
    fn fp32_is_advised_on_an_old_cpu() {
        assert!(advice(&cpu(false, false), &[]).contains("stay with fp32"));
    }

    #[test]
    fn bf16_is_advised_from_ampere_on() {
        let text = advice(&cpu(false, false), &[gpu(8)]);
        assert!(text.starts_with("On CUDA both bf16 autocast"), "{text}");
        assert!(text.contains("On the CPU"), "{text}");
    }

    #[test]
    fn fp16_is_advised_on_volta_and_neither_on_pascal() {
        let cpu = cpu(true, true);
        assert!(advice(&cpu, &[gpu(7)]).starts_with("On CUDA fp16 autocast with a GradScaler"));
        assert!(advice(&cpu, &[gpu(6)]).starts_with("This GPU has no tensor cores"));
    }
}
