//! `sealblock attach` and `sealblock detach`: a target as a block device of this machine's kernel.

use std::path::PathBuf;
use std::thread::available_parallelism;

use sealblock_exports_ublk::block_path;
use sealblock_server::events::AttachedInfo;
use sealblock_server::plan::BlockDevicePlan;
use sealblock_server::run::attach::{AttachEvent, AttachPlan, run as attach_plan};
use sealblock_server::{exports::block_device, log};
use sealblock_stack::StackError;
use sealblock_stack::quantity::count;
use serde::Serialize;

use crate::cli::{Attach, Detach};
use crate::exit::Exit;
use crate::report::{print_report, put_event, start_events};

/// Most queues unless more are asked for: a volume's work stays on one core, so that further ones seldom pay for their memory.
const MAX_DEFAULT_QUEUES: usize = 4;

/// Attaches.
pub fn run(arguments: &Attach) -> Result<Exit, StackError> {
    let _log = log::install(arguments.log, arguments.json)?;
    let cpus = available_parallelism().map_or(1, usize::from);
    let plan = AttachPlan {
        target: arguments.target.clone(),
        usage: arguments.members.usage(),
        block_device: BlockDevicePlan {
            number: arguments.device,
            queues: arguments.queues.unwrap_or(cpus.min(MAX_DEFAULT_QUEUES) as u16),
            depth: arguments.depth,
            guard: arguments.pi,
            read_only: arguments.read_only,
            tampering: None,
        },
    };
    let _events = start_events()?;
    let attached = attach_plan(&plan, |event| put_event(arguments.json, event, || to_text(event)));
    attached.map(|()| Exit::Clean)
}

fn to_text(event: &AttachEvent) -> String {
    match event {
        AttachEvent::Attached(info) => attached_text(info),
        AttachEvent::Detached { path } => format!("{} is gone", path.display()),
        AttachEvent::Left { path } => {
            format!("{} is in use and stays: its requests wait for the next server", path.display())
        }
    }
}

fn attached_text(info: &AttachedInfo) -> String {
    let AttachedInfo { path, target, taken_over, block_size, blocks, queues, host_guard, read_only, .. } = info;
    let how = [if *taken_over { ", taken over" } else { "" }, if *read_only { ", read-only" } else { "" }].concat();
    let guard = host_guard.map_or_else(String::new, |guard| format!(", tags of the kernel with {guard}"));
    let blocks = count(*blocks, "block");
    let queues = count(u64::from(*queues), "queue");
    format!("{} is {target}: {blocks} of {block_size} bytes, {queues}{guard}{how}", path.display())
}

/// The report of `detach`.
#[derive(Serialize)]
struct Report {
    path: PathBuf,
}

/// Detaches.
pub fn detach(arguments: &Detach) -> Result<Exit, StackError> {
    block_device::detach(arguments.device, arguments.force)?;
    let report = Report { path: block_path(arguments.device) };
    print_report(arguments.json, &report, || format!("{} is gone", report.path.display()))?;
    Ok(Exit::Clean)
}
