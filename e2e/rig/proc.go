package rig

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// stopGrace is how long a process has between SIGTERM and SIGKILL.
const stopGrace = 3 * time.Second

// Until calls cond until it returns nil, and then returns nil. Between calls it
// waits 2 ms, then longer, at most 100 ms. When ctx ends first the error holds
// ctx's and the last one of cond.
func Until(ctx context.Context, cond func(context.Context) error) error {
	wait := 2 * time.Millisecond
	for {
		err := cond(ctx)
		if err == nil {
			return nil
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("%w; last: %w", context.Cause(ctx), err)
		case <-t.C:
		}
		wait = min(wait*3/2, 100*time.Millisecond)
	}
}

// Proc is a process that the rig started. Safe for concurrent use.
type Proc struct {
	Name string
	Log  string // file with its standard output and error

	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
	err  error         // of Wait; read after done

	once   sync.Once
	failed error // it had ended by itself before anyone ended it; read after once
}

// StartProcess starts a command in the namespace of a node or pod; name is for logs and
// errors. Output goes to <Dir>/<name>.log, appended to when the name comes again.
// Close ends it if Stop has not.
func (r *Rig) StartProcess(in *Space, name string, args ...string) (*Proc, error) {
	return r.StartCmd(name, in.Command(context.Background(), args...))
}

// StartCmd is StartProcess for a command made by Space.Command, with its own
// environment or directory. Standard output and error are the log's.
func (r *Rig) StartCmd(name string, cmd *exec.Cmd) (*Proc, error) {
	p := &Proc{Name: name, Log: filepath.Join(r.Dir, name+".log"), cmd: cmd, done: make(chan struct{})}
	log, err := os.OpenFile(p.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("rig: log of %s: %w", name, err)
	}
	defer log.Close() // the child has its own
	cmd.Stdout, cmd.Stderr = log, log

	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, fmt.Errorf("rig: start %s: the rig is closed", name)
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("rig: start %s: %w", name, err)
	}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	r.procs = slices.DeleteFunc(r.procs, (*Proc).ended) // only the living need Close
	r.procs = append(r.procs, p)
	return p, nil
}

// PID of the process.
func (p *Proc) PID() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended.
func (p *Proc) Done() <-chan struct{} { return p.done }

// Err is how the process ended: nil in order, or while it runs.
func (p *Proc) Err() error {
	if !p.ended() {
		return nil
	}
	return p.err
}

func (p *Proc) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Ready waits until cond returns nil, as Until does, but no longer than the
// process lives. The error holds the end of the log.
func (p *Proc) Ready(ctx context.Context, cond func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-p.done:
			cancel(fmt.Errorf("the process ended: %v", p.err))
		case <-ctx.Done():
		}
	}()
	if err := Until(ctx, cond); err != nil {
		return fmt.Errorf("rig: %s is not ready: %w; its log ends:\n%s", p.Name, err, p.Tail(2000))
	}
	return nil
}

// Tail returns at most the last n bytes of the log.
func (p *Proc) Tail(n int) string {
	b, err := os.ReadFile(p.Log)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-n):])
}

// Signal sends a signal to the process.
func (p *Proc) Signal(s syscall.Signal) error {
	if p.ended() {
		return fmt.Errorf("rig: signal %s: %w", p.Name, os.ErrProcessDone)
	}
	return p.cmd.Process.Signal(s)
}

func (p *Proc) signal(s syscall.Signal) {
	if !p.ended() {
		p.cmd.Process.Signal(s) // ended meanwhile: nothing to do
	}
}

// terminate asks the process to end. The first call notes whether it had failed by itself.
func (p *Proc) terminate() {
	p.once.Do(func() {
		if p.ended() && p.err != nil {
			p.failed = fmt.Errorf("rig: %s had ended by itself: %w; its log ends:\n%s", p.Name, p.err, p.Tail(1000))
		}
	})
	p.signal(syscall.SIGTERM)
}

// Stop ends the process: SIGTERM, after three seconds SIGKILL. It returns when the process is
// gone; an error means that it is not, or that it had ended by itself with a failure.
func (p *Proc) Stop() error {
	p.terminate()
	t := time.NewTimer(stopGrace)
	defer t.Stop()
	select {
	case <-p.done:
		return p.failed
	case <-t.C:
	}
	p.signal(syscall.SIGKILL)
	t.Reset(stopGrace)
	select {
	case <-p.done:
		return p.failed
	case <-t.C:
		return fmt.Errorf("rig: %s (process %d) is still there %s after SIGKILL", p.Name, p.PID(), stopGrace)
	}
}

// Kill ends the process with SIGKILL and waits for its end: a crash.
func (p *Proc) Kill() {
	p.once.Do(func() {}) // the failure is ours
	p.signal(syscall.SIGKILL)
	<-p.done
}

// CPU is the processor time, user and system, of the process and its living
// descendants. It is read from the kernel's process clocks (clock_getcpuclockid(3)),
// whose sum is that of utime and stime in /proc/<pid>/stat, in nanoseconds instead of ticks.
func (p *Proc) CPU() (time.Duration, error) {
	var sum time.Duration
	for _, pid := range family(p.PID()) {
		var ts unix.Timespec
		clock := int32(^uint32(pid)<<3 | 2) // CPUCLOCK_SCHED of a whole process
		if err := unix.ClockGettime(clock, &ts); err != nil {
			if pid == p.PID() {
				return 0, fmt.Errorf("rig: processor time of %s: %w", p.Name, err)
			}
			continue // a child that has ended meanwhile
		}
		sum += time.Duration(ts.Nano())
	}
	return sum, nil
}

// RSS is the resident memory in bytes of the process and its descendants.
func (p *Proc) RSS() (int64, error) { return p.memory("VmRSS:") }

// Anonymous is what of RSS is no file's: the program's own pages are shared with whoever
// runs it too, and dropped when memory is short.
func (p *Proc) Anonymous() (int64, error) { return p.memory("RssAnon:") }

func (p *Proc) memory(line string) (int64, error) {
	var sum int64
	for _, pid := range family(p.PID()) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			if pid == p.PID() {
				return 0, fmt.Errorf("rig: memory of %s: %w", p.Name, err)
			}
			continue
		}
		kb, err := memoryLine(b, line)
		if err != nil {
			return 0, fmt.Errorf("rig: memory of %s: %w", p.Name, err)
		}
		sum += kb << 10
	}
	return sum, nil
}

// memoryLine reads a line "VmRSS:  1234 kB" of /proc/<pid>/status.
func memoryLine(status []byte, name string) (int64, error) {
	for line := range bytes.Lines(status) {
		if f := strings.Fields(string(line)); len(f) == 3 && f[0] == name {
			return strconv.ParseInt(f[1], 10, 64)
		}
	}
	return 0, fmt.Errorf("no %s the process has ended", name)
}

// family lists pid and its living descendants.
func family(pid int) []int {
	all := []int{pid}
	for i := 0; i < len(all); i++ {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", all[i]))
		if err != nil {
			continue
		}
		for _, t := range tasks {
			b, err := os.ReadFile(t)
			if err != nil {
				continue
			}
			for _, f := range strings.Fields(string(b)) {
				if c, err := strconv.Atoi(f); err == nil && !slices.Contains(all, c) {
					all = append(all, c)
				}
			}
		}
	}
	return all
}
