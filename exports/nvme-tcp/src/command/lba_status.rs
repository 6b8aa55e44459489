//! Get LBA Status: the known bad blocks in a range, after a scan of the range if the host requests one.

use sealblock_block::{BadBlock, Device, Expectations, Request};
use sealblock_protocols_nvme::Invalid;

use sealblock_protocols_nvme::nvm::{GetLbaStatus, LbaStatusAction, LbaStatusList};
use sealblock_runtime_reactor::submitted;
use sealblock_units::{BlockCount, Extent};

use crate::command::queue_context::NamespaceHandle;
use crate::command::queue_context::execute;
use crate::command::reply::{Reply, cut};
use crate::model::command_error::CommandError;

/// The longest reply, in bytes; each run of bad blocks takes 16.
const MAX_REPLY_BYTES: usize = 256 << 10;
/// Bytes of data in one step of a scan, so that other commands are not delayed.
const STEP_BYTES: u64 = 8 << 20;

/// Executes the command. A scan ends early when the reply is full, or when `is_over` returns that the connection has
/// ended.
pub(crate) async fn get(
    namespace: &NamespaceHandle,
    args: &GetLbaStatus,
    host_buffer_bytes: usize,
    is_over: &dyn Fn() -> bool,
) -> Result<Reply, CommandError> {
    let geometry = namespace.device.geometry();
    let extent = args.extent(geometry.capacity_blocks)?;
    let bytes = args.answer_bytes(MAX_REPLY_BYTES).min(host_buffer_bytes);
    let max_runs = bytes.saturating_sub(8) / 16;
    let damage_list = &namespace.state.damage_list;
    let mut scanned = extent.last();
    match args.action {
        LbaStatusAction::Tracked => {}
        LbaStatusAction::ScanUntracked => {
            let step = (STEP_BYTES >> geometry.block_size.shift()).clamp(1, u64::from(u32::MAX)) as u32;
            for piece in extent.split_aligned(BlockCount::new(step).unwrap_or(BlockCount::ONE)) {
                scan(namespace, piece).await?;
                scanned = piece.last();
                let so_far = Extent::from_raw(extent.start().get(), piece.last().get() - extent.start().get() + 1)
                    .map_err(Invalid::from)?;
                if is_over() || damage_list.runs(so_far, max_runs).0.len() > max_runs.saturating_sub(1) {
                    break;
                }
                // A device may complete at once; without this yield no other task would run.
                submitted().await;
            }
        }
        // This action is not supported.
        LbaStatusAction::Allocated => return Err(Invalid::field("ATYPE", 13, 24).into()),
    }
    let (descriptors, complete) = damage_list.runs(extent, max_runs);
    let page = LbaStatusList { descriptors, complete: complete && scanned == extent.last() }.encode(bytes);
    cut(&page, host_buffer_bytes, bytes as u64)
}

/// Verifies blocks, which updates the damage list. If a medium does not report which block is unreadable, the extent is
/// halved until it has one block.
async fn scan(namespace: &NamespaceHandle, extent: Extent) -> Result<(), CommandError> {
    let mut parts = vec![extent];
    while let Some(extent) = parts.pop() {
        match execute(namespace, Request::verify(extent, Expectations::NONE)).await {
            Ok(_) => {}
            Err(error) if !error.is_damage => return Err(error),
            Err(error) if error.lba.is_some() => {}
            Err(_) if extent.len() == 1 => namespace.state.report_damage(&[BadBlock::media(extent.start())]),
            Err(_) => {
                let half = BlockCount::new(extent.blocks().get() / 2).unwrap_or(BlockCount::ONE);
                let second = Extent::from_raw(
                    extent.start().get() + u64::from(half.get()),
                    extent.len() - u64::from(half.get()),
                );
                parts.push(second.map_err(Invalid::from)?);
                parts.push(Extent::new(extent.start(), half).map_err(Invalid::from)?);
            }
        }
    }
    Ok(())
}
