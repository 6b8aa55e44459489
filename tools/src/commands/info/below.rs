//! The devices below a file or block device, for `info`.
//!
//! Read from sysfs when the command runs: nothing of it is stored.

use std::path::Path;

use sealblock_stack::kernel::below::{DeviceNode, NodeKind, SECTOR_BYTES, nodes_under};
use sealblock_units::ByteCount;
use serde_json::{Value, json};

use crate::report::Lines;

/// The devices at or under a path; null where the file system lies on none that is known.
pub(super) fn as_json(path: &Path) -> Value {
    nodes_under(path).map_or(Value::Null, |nodes| nodes.iter().map(node_json).collect())
}

fn node_json(node: &DeviceNode) -> Value {
    let file = match &node.kind {
        NodeKind::Loop { file, offset_bytes } => json!({ "path": file.to_string_lossy(), "offset": offset_bytes }),
        _ => Value::Null,
    };
    json!({
        "name": node.name,
        "number": node.number.to_string(),
        "kind": kind_text(&node.kind),
        "bytes": node.sectors.saturating_mul(SECTOR_BYTES),
        "id": node.id,
        "loop_file": file,
        "arrangement": if node.members.is_empty() { None } else { Some(node.arrangement_text()) },
        "unknown": node.unknown,
        "members": node.members.iter().map(node_json).collect::<Vec<_>>(),
    })
}

fn kind_text(kind: &NodeKind) -> &'static str {
    match kind {
        NodeKind::Disk => "disk",
        NodeKind::Partition => "partition",
        NodeKind::Loop { .. } => "loop",
        NodeKind::DeviceMapper => "device-mapper",
        NodeKind::Md { .. } => "md",
    }
}

/// The same in lines, each level further in.
pub(super) fn as_text(lines: &mut Lines, path: &Path) {
    for node in nodes_under(path).iter().flatten() {
        node_text(lines, node, 0);
    }
}

fn node_text(lines: &mut Lines, node: &DeviceNode, depth: usize) {
    let name = if depth == 0 { "lies on" } else { "" };
    let size = ByteCount::new(node.sectors.saturating_mul(SECTOR_BYTES));
    let unknown = node.unknown.as_ref().map_or(String::new(), |why| format!("; its blocks cannot be mapped: {why}"));
    lines.put(name, format!("{:indent$}{}, {size}{unknown}", "", node.to_text(), indent = depth * 2));
    for member in &node.members {
        node_text(lines, member, depth + 1);
    }
}
