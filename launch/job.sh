# shellcheck shell=bash disable=SC2034,SC2329 # what runs on the nodes is sent there as text
# One attempt of a job. Each job.sbatch of `mcore-rl launch` sets the settings of its job and sources the copy of this
# file beside it; mcore_rl/launch/job.py documents the settings, the files that a job writes, and the exit statuses.
#
#   1  names of this attempt          5  settings of all nodes
#   2  how an attempt ends            6  are the nodes fit?
#   3  signals                        7  inference servers
#   4  is there work left?            8  the program          9  how it ended
#
# bash runs traps between commands and inside `wait` only, so everything that takes long runs in the background: `await`.

# ---- 1  names of this attempt
job=$SLURM_JOB_ID
queue_id=$job
run=$run_dir
if [ -n "$array_field" ]; then
  queue_id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
  run=$run_dir/$SLURM_ARRAY_TASK_ID
fi
slurm_log=$run_dir/logs/$queue_id.log
logs=$run/logs
slurm_restarts=${SLURM_RESTART_COUNT:-0}
restarts=0 # within allocations of this job, on spare nodes
if [ "$spares" -gt 0 ]; then restarts=$(cat "$logs/$job.restarts" 2>/dev/null || echo 0); fi
attempt=$((slurm_restarts + restarts))
log=$logs/$job.$attempt
nodes=${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}
mapfile -t hosts < <(scontrol show hostnames "$nodes")
rc=null      # exit status of the program
cause=       # one line on why the attempt ended, where it is known
failed_host= # host of the rank that failed first
mkdir -p "$log/failures"
# Room for the cause of a failure on a full disk: who has something to write there deletes this first.
head -c "$reserve_bytes" /dev/zero >"$log/$reserve_file" 2>/dev/null

# Ranks use no MPI, and all of this script's environment, whatever the submitting shell and the cluster say.
srun=(srun --mpi=none --export=ALL)
on_lookout=("${srun[@]}" --overlap --nodes=1 --ntasks=1)
srun+=("${srun_options[@]}") # steps on one node share a pyxis container, which is set up once
if [ ${#srun_options[@]} -gt 0 ]; then srun+=(--container-name="mcore_rl_$job"); fi
on_hosts=(--nodes="${#hosts[@]}") # the nodes of a step
if [ "$spares" -gt 0 ]; then
  choose_hosts() { # the first nodes that have not failed and that Slurm does not call broken; status 1: there are too few
    local states host usable=()
    states=$(timeout 60 sinfo -h -N -n "$nodes" -o '%N=%T' 2>/dev/null)
    for host in "${allocated[@]}"; do
      case ,$left_out in *,"$host",*) continue ;; esac
      case $(grep -m 1 "^$host=" <<<"$states") in
        *down* | *drain* | *fail* | *unknown* | *boot* | *power* | *'*') left_out=$left_out$host, ;;
        *) usable+=("$host") ;;
      esac
    done
    if [ ${#usable[@]} -lt "$num_nodes" ] || [ "${usable[-1]}" = "${allocated[0]}" ]; then return 1; fi
    hosts=("${usable[@]:0:num_nodes}")
    lookout=${usable[-1]}
  }
  allocated=("${hosts[@]}")
  left_out=${MCORE_RL_LEFT_OUT:-} # nodes that failed in this allocation, with a comma after each
  lookout=${allocated[-1]}        # another node than that of this script
  choose_hosts || hosts=("${allocated[@]:0:num_nodes}")
  # Steps take the other nodes of the allocation unless they are named.
  unused=$(printf '%s\n' "${allocated[@]}" | grep -vxF -f <(printf '%s\n' "${hosts[@]}") | paste -sd,)
  # A lost node never says that its step has ended, and Slurm would keep the resources of that step on the other nodes.
  srun+=(--overlap)
  on_hosts=(--nodes="$num_nodes" --exclude="$unused")
fi
on_each_host=("${on_hosts[@]}" --ntasks="${#hosts[@]}" --ntasks-per-node=1 --kill-on-bad-exit=0)

# ---- 2  how an attempt ends
message() { printf '%s [%s.%s] %s\n' "$(date +%FT%T)" "$job" "$attempt" "$*"; }

checkpoint() { # step of the last complete checkpoint
  cat "$run/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0
}

at_step() { # text: with the step of a training
  if [ -n "$is_training" ]; then echo "$1 step $(checkpoint)"; fi
}

in_json() { tr -s '[:cntrl:]' ' ' <<<"$1" | sed 's/[\\"]/\\&/g; s/ *$//'; }

record() { # event why then: append a line to attempts.jsonl
  local line step=null
  if [ -n "$is_training" ]; then step=$(checkpoint); fi
  line=$(printf '{"event": "%s", "time": %s, "job": "%s", "attempt": %s, "nodes": "%s", "step": %s, "status": %s, "why": "%s", "then": "%s", "host": "%s", "cause": "%s"}' \
    "$1" "$(date +%s)" "$job" "$attempt" "$nodes" "$step" "$rc" "$2" "$3" "$failed_host" "$(in_json "$cause")")
  echo "$line" 2>/dev/null >>"$run/attempts.jsonl" || {
    rm -f "$log/$reserve_file"
    echo "$line" >>"$run/attempts.jsonl"
  }
}

free_mib() { # MiB that are free for the run
  df -Pk "$run" | awk 'NR == 2 { print int($4 / 1024) }'
}

leave() { # status why text: end the job
  message "$3 (exit status $1)"
  record end "$2" "$1"
  exit "$1"
}

of_job() { # key: print its value in Slurm's current record of the job
  scontrol show job -o "$queue_id" | sed -n "s/.* $1=\([^ ]*\).*/\1/p" | head -n 1
}

with_excluded() { # nodes: print them with those that the job excludes already
  local excluded
  excluded=$(of_job ExcNodeList)
  excluded=${excluded#(null)}
  echo "${excluded:+$excluded,}$1"
}

is_preempted() { # in the grace time of a preemption only the program gets TERM, and this script nothing
  case $(of_job PreemptTime) in
    # Without a grace time the job is requeued already, and only its log has Slurm's word for it.
    '' | None | N/A | Unknown) sed -n "/\[$job\.$attempt\] on /,\$p" "$slurm_log" | grep -q 'JOB .* DUE TO PREEMPTION' ;;
  esac
}

restart_here() { # why [unfit,nodes]: begin anew on nodes of this allocation that have not failed; return where that cannot help
  local name hosts_before="${hosts[*]}"
  if [ -n "$why" ]; then return; fi # Slurm or its time limit ends the allocation
  case $1 in crash | hang | unfit) ;; *) return ;; esac
  if [ "$(of_job JobState) $(of_job Restarts)" != "RUNNING $slurm_restarts" ]; then return; fi # an orphan
  for name in ${2//,/ } $failed_host; do left_out=$left_out$name,; done
  if ! choose_hosts; then
    message "fewer than $num_nodes nodes of the allocation are left: ${left_out%,} failed"
    return
  fi
  # Without checks of the nodes nobody would notice that the fault is one of these.
  if [ -z "$is_checked" ] && [ "${hosts[*]}" = "$hosts_before" ]; then return; fi
  message "$1: begins anew on $(IFS=, && echo "${hosts[*]}"), within the allocation${left_out:+ and without ${left_out%,}}"
  record end "$1" restart
  echo $((restarts + 1)) >"$logs/$job.restarts"
  export MCORE_RL_LEFT_OUT=$left_out
  kill "$watcher" 2>/dev/null
  exec bash -p "$0"
}

requeue() { # why [unfit,nodes]: requeue under the same id, so that jobs which depend on this one keep waiting
  trap '' TERM USR1
  # After the loss of a node Slurm has requeued the job itself: this orphan must neither end the next attempt nor bring
  # back a job that was cancelled.
  local state
  while state=$(of_job JobState); [ -z "$state" ]; do
    message "Slurm does not answer; trying again"
    sleep 30
  done
  if [ "$state $(of_job Restarts)" != "RUNNING $slurm_restarts" ]; then
    message "Slurm has ended this attempt already"
    record end lost orphan
    exit "${status[cancelled]}"
  fi
  record end "$1" requeue # first: from the requeue on Slurm may end this script at any moment
  if ! scontrol requeue "$queue_id"; then leave "${status[not_requeued]}" "$1" "Slurm refuses to requeue the job"; fi
  if [ -n "$2" ]; then
    # Excluded nodes can be changed only once the job is pending; Slurm kills this script only after KillWait.
    for _ in $(seq 60); do
      if scontrol update JobId="$queue_id" ExcNodeList="$2" 2>/dev/null; then break; fi
      sleep 0.5
    done
  fi
  exit 0
}

is_limit_short() { # the job's limit, which people change, has become one that `mcore-rl launch` refuses: why, in cause
  local limit_s
  limit_s=$(of_job TimeLimit | awk -F'[-:]' 'NF > 2 { print ((NF > 3 ? $1 * 24 : 0) + $(NF - 2)) * 3600 + $(NF - 1) * 60 + $NF }')
  if [ -z "$limit_s" ] || [ "$limit_s" -gt "$signal_s" ]; then return 1; fi
  cause="the time limit of the job is now $limit_s s, not more than survival.signal_s=$signal_s: each attempt would be asked to save before it began"
}

refuse_short_limit() {
  if ! is_limit_short; then return; fi
  leave "${status[refused]}" limit "$cause. Submit again with a longer limit: the run resumes from step $(checkpoint)"
}

count_attempts() { # number: starts in a row without a new checkpoint
  echo "$before $1" >"$logs/$queue_id.tries"
}

back_or_give_up() { # why status [unfit,nodes]
  if [ -z "$is_training" ]; then
    if [ "$attempt" -ge $((max_attempts - 1)) ]; then leave "$2" "$1" "$1: giving up after $max_attempts attempts"; fi
    requeue "$1" "$3"
  fi
  if [ "$1" = limit ]; then refuse_short_limit; fi
  if [ "$(checkpoint)" -le "$before" ] && [ "$tries" -ge "$max_attempts" ]; then
    leave "$2" "$1" "$1: $tries attempts without a new checkpoint, giving up"
  fi
  if [ "$spares" -gt 0 ]; then restart_here "$1" "${3:-}"; fi
  message "$1: requeued, to resume from step $(checkpoint)"
  requeue "$1" "${3:-}"
}

failed() { # why status: after a crash or a hang leave out a node that fails again and again, and give up after too many
  ends() { grep "^{\"event\": \"end\".*\"job\": \"$job\"" "$run/attempts.jsonl" 2>/dev/null; }
  local all again=0
  all=$(($(ends | grep -c '"why": "\(crash\|hang\)"') + 1))
  if [ "$all" -ge "$max_crashes" ]; then
    leave "${status[crash_limit]}" "$1" "$1: $all crashes and hangs in all, giving up"
  fi
  if [ "$1" = crash ] && [ -n "$failed_host" ]; then
    again=$(($(ends | tail -n $((bad_node_attempts - 1)) | grep -c "\"why\": \"crash\".*\"host\": \"$failed_host\"") + 1))
  fi
  if [ "$again" -lt "$bad_node_crashes" ]; then back_or_give_up "$1" "$2"; fi
  message "$failed_host crashed in $again of the last $bad_node_attempts attempts: it is excluded"
  tries=$((tries - 1)) # the next attempt is without the node that may have been the reason
  count_attempts "$tries"
  back_or_give_up "$1" "$2" "$(with_excluded "$failed_host")"
}

wait_for_folder() { # until the run's folder can be written, and the log that Slurm opens when it starts the job again; sets waited_s
  local since=$SECONDS fault="cannot be written"
  while ! { : >>"$run/attempts.jsonl" && : >>"$slurm_log"; } 2>/dev/null; do
    if [ ! -d "$run" ]; then fault="is gone: it was renamed, moved or deleted, or is not mounted. Give it back its name"; fi
    if [ -z "$waited_s" ]; then message "$run $fault: waiting up to $writable_s s"; fi
    waited_s=$((SECONDS - since))
    if [ "$why" = term ] || [ "$why" = limit ]; then return; fi
    if [ "$waited_s" -ge "$writable_s" ]; then leave "${status[no_space]}" disk "$run could not be written for $waited_s s: giving up"; fi
    sleep 5 &
    wait $!
  done
}

# ---- 3  signals. `why` is limit: the time limit is near (USR1); or term: cancelled, or a node is lost (TERM)
explain_term() { # why TERM came, as Slurm has it. The end is recorded at once: Slurm may kill this script before the program ends
  local state asked grace_s cause=cancelled ended=term then=${status[cancelled]}
  state="$(of_job JobState) $(of_job Reason)"
  if is_preempted; then
    ended=preempted cause="Slurm requeues the job, or cancels it"
    asked=$(sed -n 's/.*STEP .* CANCELLED AT \([0-9T:-]*\) .*/\1/p' "$log"/node-*.log 2>/dev/null | head -n 1)
    grace_s=$(($(date +%s) - $(date -d "${asked:-now}" +%s)))
    if [ "$grace_s" -gt 2 ]; then # the program was asked to save before this script was ended
      cause="the run did not save in the grace time of $grace_s s: ask for a longer GraceTime, or set a smaller checkpoint.interval"
    fi
    count_attempts $((tries - 1)) # an attempt that was preempted is no failed one
  elif [[ $(of_job Restarts) -gt $slurm_restarts ]]; then
    cause=$(sinfo -h -N -n "$nodes" -o '%N is %T' 2>/dev/null | grep -m 1 'down\|fail\|unknown\|\*$')
    cause=${cause:+a node is lost: $cause}
    cause=${cause:-requeued by its user or an administrator}
  else
    case $state in
      RUNNING*)
        is_stop=1
        message "TERM was sent to the whole job, as scancel --full --signal=TERM does: the run saves and stops"
        return
        ;;
      *TimeLimit)
        ended=limit cause="Slurm has ended the attempt: its time limit was set below the time that it had run"
        if is_limit_short; then
          then=${status[refused]}
        elif scontrol requeue "$queue_id"; then
          then=requeue
        fi
        ;;
      CANCELLED* | COMPLETING*) ;;
      *) cause="cancelled, or a node is lost" ;; # Slurm does not answer
    esac
  fi
  message "$ended: $cause"
  record end "$ended" "$then"
}

leave_on_term() {
  if [ -z "$is_training" ]; then leave "${status[cancelled]}" term "cancelled, or a node is lost"; fi
  handle_signal # which TERM may have had no time for
  if [ -z "$is_stop" ]; then exit "${status[cancelled]}"; fi
  cause="TERM was sent to the whole job"
  if [ "$rc" != 0 ] && [ "$rc" != null ]; then
    leave "${status[cancelled]}" term "ended by TERM to the whole job: the steps after $(checkpoint) are lost"
  fi
  leave "${status[stopped]}" term "stopped by TERM to the whole job, at step $(checkpoint)"
}

handled='' # the signal that was handled last
asked_s=0  # when it came
is_stop=   # TERM came, and Slurm goes on with the job: somebody has sent it to the whole job, as scancel --full does
handle_signal() { # react to a signal that came. TERM also reaches the program itself
  local now=$why # another may come meanwhile: that is the next call's
  if [ "$now" != "$handled" ]; then
    handled=$now
    asked_s=$SECONDS
    message "signal: $now"
    if [ "$now" = term ]; then explain_term; fi
  fi
  if [ "$now" != limit ] && [ -z "$is_stop" ]; then return; fi
  touch "$run/STOP" # repeatedly, because a program that is starting deletes it as an old one
  if [ "$now" = limit ] && [ $((SECONDS - asked_s)) -ge $((signal_s > 60 ? signal_s - 30 : signal_s / 2)) ]; then
    cause="the run did not save within $((SECONDS - asked_s)) s: set survival.signal_s=$signal_s to more than a step and a save take"
    message "no time is left to wait for the save: $cause"
    back_or_give_up limit "${status[stalled]}"
  fi
}

servers=() # processes of srun
await() { # pid: wait for its end and handle signals meanwhile; its status in rc
  local server
  while kill -0 "$1" 2>/dev/null; do
    if [ -n "$is_training" ]; then handle_signal; fi
    for server in "${servers[@]}"; do
      if [ "$1" = "${program:-}" ] && ! kill -0 "$server" 2>/dev/null; then
        message "a component has ended: ending the program"
        kill "$1"
        servers=()
      fi
    done
    sleep 1 &
    wait $!
  done
  wait "$1"
  rc=$?
}

# ---- 4  is there work left, and may this job do it?
shown_nodes=$nodes
if [ "$spares" -gt 0 ]; then shown_nodes="${hosts[*]} (spare: $unused)"; fi
message "on $shown_nodes$(at_step ', from'), until $(squeue -h -j "$job" -o %e | head -n 1)"
if [ -n "$is_training" ]; then
  if [ -e "$run/DONE" ]; then leave 0 finished "nothing to do: $run/DONE exists"; fi
  if ! (set -C && echo "$job" >"$logs/holder") 2>/dev/null; then # the job that creates the file owns the run
    holder=$(<"$logs/holder")
    if [ "$holder" != "$job" ] && [ -n "$(squeue -h -j "$holder" -t RUNNING -o %i 2>/dev/null)" ]; then
      leave "${status[in_use]}" in_use "job $holder is running and writes to $run"
    fi
    echo "$job" >"$logs/holder"
  fi
  # Counted at the start: an attempt that ends with its node counts too.
  before=$(checkpoint) seen=-1 tries=0
  if [ -e "$logs/$queue_id.tries" ]; then read -r seen tries <"$logs/$queue_id.tries"; fi
  if [ "$before" -gt "$seen" ]; then tries=0; fi
  tries=$((tries + 1))
  count_attempts "$tries"
  if [ "$tries" -gt "$max_attempts" ]; then
    leave "${status[stalled]}" ended "$max_attempts attempts without a new checkpoint: giving up"
  fi
else
  rm -f "$run/DONE" # of a conversion before
fi
record_lost() { # job attempt nodes: the end of an attempt whose script was lost with its first node
  local job=$1 attempt=$2 nodes=$3 first cause
  first=$(scontrol show hostnames "$nodes" | head -n 1)
  cause="attempt $attempt of job $job ended without a word: its first node $first was lost, or the script was killed"
  cause="$cause (state of $first now: $(sinfo -h -N -n "$first" -o %T 2>/dev/null | head -n 1))"
  message "$cause"
  record end lost requeue
}
IFS='|' read -r last_job last_attempt last_nodes < <(tail -n 1 "$run/attempts.jsonl" 2>/dev/null |
  sed -n 's/^{"event": "start".*"job": "\([^"]*\)", "attempt": \([0-9]*\), "nodes": "\([^"]*\)".*/\1|\2|\3/p')
if [ -n "$last_job" ]; then record_lost "$last_job" "$last_attempt" "$last_nodes"; fi
record start "" ""
if free=$(free_mib) && [ -n "$free" ] && [ "$free" -lt 1024 ]; then message "warning: only $free MiB are free at $run"; fi
ln -sfn "$job.$attempt" "$logs/latest"
# Slurm starts a job whose folder is gone in /tmp, where everybody may have put files; and without the copy of the code
# Python would take an installed one.
folders=("$work_dir")
if [ -n "$code_dir" ]; then folders=("$code_dir" "$work_dir"); fi
for folder in "${folders[@]}"; do
  if cd "$folder"; then continue; fi
  cause="$folder cannot be entered on ${hosts[0]}: it was deleted, moved, or is not mounted there"
  leave "${status[refused]}" refused "$cause. Restore it and submit again, or launch again"
done
if [ "$(bash -c 'echo begun' </dev/null 2>/dev/null | tail -n 1)" != begun ]; then
  cause="BASH_ENV=${BASH_ENV:-} ends every bash before its first command"
  leave "${status[refused]}" refused "$cause. Correct that file or unset BASH_ENV, and submit again"
fi
if [ -n "$is_training" ]; then refuse_short_limit; fi

if [ "$spares" -gt 0 ]; then
  # Because of --no-kill Slurm leaves a job alone that has lost its first node, and this script with it: a task on
  # another node has it requeued then.
  watch() { # job node restarts
    of() { sed -n "s/.* $1=\([^ ]*\).*/\1/p" <<<"$record" | head -n 1; }
    while sleep 15; do
      record=$(scontrol show job -o "$1") || continue # Slurm does not answer
      if [ "$(of JobState) $(of Restarts)" != "RUNNING $3" ]; then exit; fi
      if ! scontrol show hostnames "$(of NodeList)" | grep -qx "$2"; then exec scontrol requeue "$1"; fi
    done
  }
  "${on_lookout[@]}" --nodelist="$lookout" --output="$log/lookout-%N.log" \
    bash -c "$(declare -f watch)"$'\nwatch "$@"' watch "$queue_id" "${allocated[0]}" "$slurm_restarts" &
  watcher=$!
fi

# ---- 5  settings of all nodes
unset PYTHONHOME PYTHONUSERBASE # of the submitting shell: they would change what Python imports
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 "${environment[@]}"
if [ -n "$environment_file" ]; then
  # Keys of the user, NAME=value in each line: nothing of them is written to the run's folder.
  if [ ! -r "$environment_file" ]; then leave "${status[refused]}" refused "environment_file cannot be read: $environment_file"; fi
  while IFS= read -r line || [ -n "$line" ]; do
    case $line in
      '#'*) ;;
      *=*) export "${line%%=*}=${line#*=}" ;;
    esac
  done <"$environment_file"
fi
# The job's own come last: the file may have changed since it was checked.
MASTER_ADDR=${hosts[0]}
# A new port for each attempt: an orphan of the last one may still have its port open.
MASTER_PORT=$((20000 + (job * 7 + attempt) % 10000))
NUM_NODES=${#hosts[@]}
MCORE_RL_FAILURES=$log/failures # each rank that knows of a cause writes it there
export MASTER_ADDR MASTER_PORT NUM_NODES MCORE_RL_FAILURES
if [ -n "$is_bound" ]; then export MCORE_RL_BIND=$ranks_per_node; fi # each rank takes its share of the cores near its GPU
if [ -n "$code_dir" ]; then
  # This copy of the code comes first; the working folder is for reward functions of the user. What strangers write is
  # imported from nowhere: a sitecustomize.py would run on every rank.
  export PYTHONPATH=$code_dir PYTHONSAFEPATH=1
  if [ -n "$(find -L "$work_dir" -maxdepth 0 ! -perm -o=w \( -user "$UID" -o -user 0 \))" ]; then
    PYTHONPATH=$PYTHONPATH:$work_dir
  else
    message "warning: $work_dir is not on PYTHONPATH: everybody may write it, or it is another user's." \
      "Launch from a folder of your own, or add it in python.setup"
  fi
fi
if [ -n "$cache" ]; then eval "export TRITON_CACHE_DIR=\"$cache/triton\" TORCHINDUCTOR_CACHE_DIR=\"$cache/inductor\""; fi

# Nodes get bash as text: first the lines of the set-up, then functions and settings of this file, which no variable of
# the set-up can change.
enter_folders() {
  local folder
  for folder in "${folders[@]}"; do
    if cd "$folder"; then continue; fi
    echo "$SLURMD_NODENAME: UNFIT: $folder cannot be entered: it was deleted, moved, or is not mounted there" >&2
    exit 1
  done
}
explain_python() { # status: end this shell with it; where it is that of a shell without such a program, with its line
  case $1 in 126 | 127) echo "$SLURMD_NODENAME: UNFIT: python.command cannot be started: $(eval "$python"' -c ""' 2>&1 | tail -n 1)" ;; esac
  exit "$1"
}
set_up=$(
  declare -p folders
  declare -f enter_folders explain_python
  echo enter_folders
  if [ -n "$scratch" ] || [ ${#setup[@]} -gt 0 ]; then
    cat <<'ON_A_NODE'
set -e # the first line that fails ends this shell
trap 'status=$?; echo "$SLURMD_NODENAME: UNFIT: $setting failed with status $status: $BASH_COMMAND" >&2' EXIT
ON_A_NODE
    if [ -n "$scratch" ]; then printf '%s\n' setting=paths.scratch "mkdir -p \"$scratch\"" "export TMPDIR=\"$scratch\""; fi
    if [ ${#setup[@]} -gt 0 ]; then printf '%s\n' setting=python.setup "${setup[@]}"; fi
    printf '%s\n' 'trap - EXIT' 'set +e'
  fi
)
python=${inside:+$inside }$python
text_of() { # function setting...: bash that calls a function of this file, with these settings, with its own arguments
  declare -p "${@:2}"
  declare -f "$1"
  printf '%s "$@"\n' "$1"
}

# ---- 6  are the nodes fit? A fit node creates a file; an unfit one writes why to check-<host>.log
fault_of() { # host: why it is not fit, from its log: its first finding, else the last line of the command that failed
  local file=$log/check-$1.log text
  text=$(sed -n "s/^$1: UNFIT: //p" "$file" 2>/dev/null | head -n 1)
  if [ -z "$text" ]; then text=$(grep -v '^srun: \|\*\*\* STEP\|^ *$' "$file" 2>/dev/null | tail -n 1); fi
  if [ -z "$text" ]; then text=$(grep 'srun: error: ' "$log/srun.log" | grep -vm 1 ': tasks\? '); fi
  echo "${text:-no answer: the node is down, or set up no container within $((check_timeout_s + image_timeout_s)) s}"
}

check_node() { # folder hosts
  local checked
  for checked in "${pre_node[@]}"; do
    eval "$checked" || { echo "$SLURMD_NODENAME: UNFIT: checks.pre_node failed with status $?: $checked"; exit 1; }
  done
  if [ ${#check_arguments[@]} -gt 0 ]; then
    export TORCH_NCCL_BLOCKING_WAIT=1 # so that waiting for a broken node is an error and does not end this process
    eval "$python"' -m mcore_rl.cli.node_check --hosts "$2" --node "$SLURM_NODEID" --port "$MASTER_PORT" "${check_arguments[@]}"' || explain_python $?
  fi
  touch "$1/$SLURMD_NODENAME"
}

limit_check() { # folder hosts check: the limit runs on the node, so that to set up a container's image does not count
  local ended
  if [ -n "$inside" ]; then
    eval "$inside true" || { echo "$SLURMD_NODENAME: UNFIT: container.image cannot be set up"; exit 1; }
  fi
  timeout --kill-after=10 "$check_timeout_s" bash -c "$3" check "$1" "$2"
  ended=$?
  if [ "$ended" = 124 ]; then echo "$SLURMD_NODENAME: UNFIT: the checks did not end within $check_timeout_s s"; fi
  exit "$ended"
}

if [ -n "$is_checked" ]; then
  mkdir -p "$log/fit"
  timeout --kill-after=10 $((check_timeout_s + image_timeout_s + 30)) "${srun[@]}" "${on_each_host[@]}" --output="$log/check-%N.log" \
    bash -c "${inside:+$set_up}"$'\n'"$(text_of limit_check inside check_timeout_s)" check "$log/fit" "$(IFS=, && echo "${hosts[*]}")" \
    "$set_up"$'\n'"$(text_of check_node pre_node check_arguments python)" 2>"$log/srun.log" &
  await $!
  cat "$log/srun.log" >&2
  rc=null
  unfit=
  kinds=$logs/$queue_id.unfit # a line for each unfit node of this job: kind of the fault, node
  for host in "${hosts[@]}"; do
    if [ -e "$log/fit/$host" ] || [ "$why" = term ]; then continue; fi
    unfit=${unfit:+$unfit,}$host
    cause="$host: $(fault_of "$host")"
    message "unfit: $cause"
    # What differs from node to node is no part of the kind.
    kind=$(sed "s/$host/HOST/g; s/[0-9][0-9.]*/N/g" <<<"${cause#*: }" | tr -s '[:space:]' ' ')
    printf '%s\t%s\n' "$kind" "$host" >>"$kinds"
  done
  if [ "$why" = term ]; then leave_on_term; fi
  if [ -n "$unfit" ]; then
    # A fault that all nodes have is the job's, or the cluster's file's: other nodes would have it too. One node proves
    # nothing, unless it is of [python], and two nodes whose all-reduce fails may have one broken one between them.
    enough=2
    case $kind in python.*) enough=1 ;; *all-reduce*) enough=3 ;; esac
    all=$(grep -cF "$kind"$'\t' <(tail -n "$NUM_NODES" "$kinds"))
    seen=$(grep -F "$kind"$'\t' "$kinds" | sort -u | wc -l)
    if [ "$(tr -cd , <<<"$unfit" | wc -c)" = $((NUM_NODES - 1)) ] && [ "$all" = "$NUM_NODES" ] && [ "$seen" -ge "$enough" ]; then
      cause="every node is unfit in the same way: ${cause#*: }"
      leave "${status[refused]}" unfit "$cause. Correct the cluster's file or the nodes, and submit again: see $log/check-*.log"
    fi
    message "unfit nodes: $unfit, see $log/check-*.log"
    back_or_give_up unfit "${status[unfit_nodes]}" "$(with_excluded "$unfit")"
  fi
fi

# ---- 7  inference servers, the second component of a heterogeneous job
if [ -n "$server_command" ]; then
  SERVER_HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1" | paste -sd,)
  SERVER_PORT=$((20000 + job % 1000 * server_ports)) # jobs that share a node do not share ports
  SERVER_URLS=
  for host in ${SERVER_HOSTS//,/ }; do
    for index in $(seq 0 $((server_ports - 1))); do
      SERVER_URLS=${SERVER_URLS:+$SERVER_URLS,}'"http://'$host:$((SERVER_PORT + index))'"'
    done
  done
  export SERVER_HOSTS
  if [ "$server_ports" -gt 0 ]; then export SERVER_PORT; fi
  for argument in "${server_arguments[@]}"; do
    argument=${argument//'{urls}'/"$SERVER_URLS"}
    arguments+=("${argument//'{hosts}'/$SERVER_HOSTS}")
  done
  "${srun[@]}" --het-group=1 --kill-on-bad-exit=1 --output="$log/server-%N.log" bash -c "$set_up"$'\n'"$server_command" &
  servers+=($!)
fi

# ---- 8  the program
# Other code may come first: by a PYTHONPATH of python.setup or of the image, or by an option of Python. -c searches as -m does.
import_check='import os, sys, importlib.util
spec = importlib.util.find_spec("mcore_rl")
found = os.path.dirname(list(spec.submodule_search_locations)[0]) if spec else "no folder"
os.path.realpath(found) == os.path.realpath(sys.argv[1]) or sys.exit(f"OTHER CODE: mcore_rl is imported from {found}, and not from the copy of the code of this job, {sys.argv[1]}")'
start_program() { # argument...
  if [ -n "$code_dir" ] && [ "${SLURM_LOCALID:-0}" = 0 ]; then
    eval "$python"' -c "$import_check" "$code_dir"' || explain_python $?
  fi
  shopt -s execfail # an exec that fails is explained, too
  # A process above each rank outlives it and records how it died.
  case $starter in
    once) eval "exec $python"' -m "$module" "$@"' ;;
    srun) eval "exec $python"' -m mcore_rl.workers.rank_process "$module" "$@"' ;;
    torchrun)
      eval "exec $python"' -m mcore_rl.workers.torchrun "$signal_s" --nnodes="$NUM_NODES" --nproc-per-node="$ranks_per_node" \
        --max-restarts=0 --node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
        -m mcore_rl.workers.rank_process "$module" "$@"'
      ;;
  esac
  explain_python $?
}

if [ -n "$is_training" ]; then
  arguments+=("run_dir=$run")
  if [ -n "$array_field" ]; then arguments+=("$array_field=$SLURM_ARRAY_TASK_ID"); fi
  : >"$log/$not_writer" # the program deletes it once the run's folder is its own
fi
step=("${srun[@]}" --kill-on-bad-exit=1 --wait=60 --output="$log/node-%N.log")
if [ "$starter" = once ]; then step+=(--nodes=1 --ntasks=1); fi
if [ "$spares" -gt 0 ]; then step+=("${on_hosts[@]}" --ntasks=$((NUM_NODES * tasks_per_node))); fi
if [ "$cores_per_task" -gt 0 ]; then step+=(--cpus-per-task="$cores_per_task"); fi
if [ -n "$is_bound" ]; then step+=(--cpu-bind=none); fi
# srun reports the tasks in the order in which it hears of them, those that it ends itself among them: srun.log has that.
consequences='^srun: error: .*: tasks\? \|^srun: .*Terminating StepId\|^srun: Force Terminated'
"${step[@]}" bash -c "$set_up"$'\n'"$(text_of start_program python import_check starter module code_dir signal_s ranks_per_node)" program "${arguments[@]}" \
  2> >(tee "$log/srun.log" | grep --line-buffered -v "$consequences" >&2) &
program=$!
await "$program"
program_rc=$rc
if [ ${#servers[@]} -gt 0 ]; then kill "${servers[@]}" 2>/dev/null; fi
if [ ${#post_node[@]} -gt 0 ] && [ "$why" != term ]; then
  timeout --kill-after=10 "$check_timeout_s" "${srun[@]}" "${on_each_host[@]}" --output="$log/after-%N.log" \
    bash -c "$(printf '%s\n' "$set_up" "${post_node[@]}")" &
  await $!
  message "checks after the program: status $rc, see $log/after-*.log"
fi

# ---- 9  how it ended
rc=$program_rc
if [ "$rc" != 0 ] && [ -z "$why" ]; then
  sleep 2 & # time for a TERM that is on its way
  wait $!
fi
if [ "$rc" != 0 ]; then cause=$(sed -n 's/: UNFIT: /: /p; s/^OTHER CODE: //p' "$log"/node-*.log 2>/dev/null | head -n 1); fi
case $cause in "mcore_rl is imported from "* | *": python.command cannot "*)
  leave "${status[refused]}" refused "$cause. Correct python.setup, python.command or the container's image, and submit again"
  ;;
esac

failed_with= # exit status that the first cause has
find_cause() { # the first cause comes before all that followed from it
  local causes host name unwritten_cause
  # The names of the causes sort the first of the gravest to the front: see mcore_rl/workers/failures.py.
  causes=("$log"/failures/[0-9]-*.json)
  if [ -e "${causes[0]}" ]; then
    cp "${causes[0]}" "$log/failure.json"
    cause=$(sed -n 's/^ "headline": "\(.*\)",$/\1/p' "$log/failure.json")
    cause=${cause//\\\"/\"}
    cause=${cause//\\\\/\\}
    failed_with=$(sed -n 's/^ "status": \([0-9]*\),$/\1/p' "$log/failure.json")
    host=$(sed -n 's/^ "host": "\(.*\)",$/\1/p' "$log/failure.json")
    case ${causes[0]##*/} in [01]-*) ;; *) host= ;; esac # who has only lost its peer is innocent
    for name in "${hosts[@]}"; do
      if [ "$name" = "$host" ] || [ "$name" = "${host%%.*}" ]; then failed_host=$name; fi
    done
  elif unwritten_cause=$(sed -n "s/.*$unwritten \([0-9]-[0-9.]*-[0-9]*\): /\1 /p" "$log"/node-*.log 2>/dev/null | LC_ALL=C sort | head -n 1) &&
    [ -n "$unwritten_cause" ]; then # the folder of the causes could not be written: it is read-only, or gone
    cause=${unwritten_cause#* }
  elif [ -z "$cause" ]; then # not even the process above a rank was left: Slurm may know
    cause=$({ grep -hm1 'oom_kill event' "$log"/node-*.log || grep -m1 'srun: error: ' "$log/srun.log"; } 2>/dev/null | head -n 1)
  fi
}

waited_s= # the time for which the run's folder could not be written
preempted=
is_full=
if [ -n "$is_training" ]; then
  if [ "$rc" != 0 ]; then wait_for_folder; fi
  if [ -z "$why" ] && is_preempted; then preempted=1; fi
  if [ "$rc" != 0 ] && [ "$why" != term ] && [ -z "$preempted" ] && [ ! -e "$run/DONE" ]; then
    find_cause
    if [ -n "$waited_s" ]; then cause="$run could not be written for $waited_s s${cause:+: $cause}"; fi
    free=$(free_mib)
    case $cause in *"No space left on device"* | *"Disk quota exceeded"*) is_full=1 ;; esac
    if [ -n "$is_full" ] || [ "${free:-100}" -lt 64 ]; then
      is_full=1
      rm -f "$log/$reserve_file" # so that these words themselves have room
      cause="the disk is full ($free MiB free at $run)${cause:+: $cause}"
    fi
  fi
fi
if [ -n "$cause" ]; then message "first cause: $cause"; fi
message "the program exited with $rc$(at_step ', at')"

if [ -z "$is_training" ]; then
  if [ "$why" = term ]; then leave_on_term; fi
  if [ "$rc" != 0 ]; then leave "$rc" crash failed; fi
  printf '%s\n' "$done_text" >"$run/DONE"
  leave 0 finished "done"
fi
if [ -e "$run/DONE" ]; then leave 0 finished "all steps are done"; fi
if [ "$why" = term ]; then leave_on_term; fi
if [ -n "$preempted" ]; then
  count_attempts $((tries - 1)) # an attempt that was preempted is no failed one
  back_or_give_up preempted "${status[stalled]}"
fi
if [ "$rc" = 0 ]; then
  if [ -z "$why" ] && [ -e "$run/STOP" ]; then leave "${status[stopped]}" stop "stopped by $run/STOP"; fi
  # The program stops without this script's word only where the signal came to its step alone.
  if [ -z "$why" ]; then
    cause=$(sed -n 's/.*: \(SIG[A-Z0-9]*\) came.*/\1/p' "$log"/node-*.log 2>/dev/null | head -n 1)
    cause="the program stopped with a save: ${cause:-a signal} came to its step alone, not to this script"
  fi
  back_or_give_up "${why:-ended}" "${status[stalled]}"
fi
if [ -n "$why" ]; then back_or_give_up "$why" "${status[stalled]}"; fi
if [ -n "$is_full$waited_s" ]; then back_or_give_up disk "${status[no_space]}"; fi
case $failed_with in
  2) if [ "$(checkpoint)" -le "$before" ]; then leave "${status[refused]}" refused "the error of the program must be corrected first"; fi ;;
  "$hung_status") failed hang "${status[hang_loop]}" ;;
esac
failed crash "${status[crash_loop]}"
