//! A server of block devices that changes what passes through it, so that whoever has to find that out is seen to.

use anyhow::{Result, bail};
use sealblock_exports_ublk::{HostGuard, Tampering};
use sealblock_server::attach::{AttachEvent, AttachPlan, run};
use sealblock_stack::Usage;
use sealblock_stack::target::TargetName;

/// Reads a guard's name.
pub fn guard(text: &str) -> Result<HostGuard, String> {
    let named = HostGuard::ALL.into_iter().find(|guard| guard.as_str() == text);
    named.ok_or_else(|| format!("no guard {text}"))
}

/// Reads which way is tampered with.
pub fn way(text: &str) -> Result<Tampering, String> {
    match text {
        "reads" => Ok(Tampering::Reads),
        "writes" => Ok(Tampering::Writes),
        _ => Err(format!("neither reads nor writes: {text}")),
    }
}

/// Attaches until a signal, and prints the path of the block device as `sealblock attach --json` does.
pub fn attach(target: &TargetName, guard: HostGuard, way: Tampering) -> Result<()> {
    let plan = AttachPlan {
        target: target.clone(),
        usage: Usage::Alone,
        number: None,
        queues: 1,
        depth: 16,
        guard: Some(guard),
        read_only: false,
        tampering: Some(way),
    };
    let report = |event: &AttachEvent| {
        if let AttachEvent::Attached(info) = event {
            println!("{}", serde_json::json!({ "path": info.path }));
        }
    };
    match run(&plan, report) {
        Ok(()) => Ok(()),
        Err(failure) => bail!("{failure}"),
    }
}
