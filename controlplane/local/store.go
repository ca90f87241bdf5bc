package local

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"aether/controlplane/registrypb"
)

const (
	maxRecord    = 1 << 20 // of a pod's file: Kubernetes allows 256 KiB of annotations
	maxContainer = 128     // of a container ID: it is a file's name
	maxVolumes   = 4096    // of a pod: an object of Kubernetes has no room for more

	recordVersion = 1
	recordSuffix  = ".json"
	damagedSuffix = ".damaged"
)

// record is a pod as it stands on disk. Fields that a newer version added are not read.
type record struct {
	Version int `json:"version"`
	Pod
	// Health is the last one found, so that a restart demotes nobody (contract 13.1).
	Health string `json:"health"`
	// Phase of the pod's end, when the next one begins, and how long the phase is at most.
	Phase phase         `json:"phase,omitempty"`
	Next  time.Time     `json:"next,omitzero"`
	Drain time.Duration `json:"drain,omitempty"` // nanoseconds; 0: not known
	// Order of the pods' coming: the row of an address is the latest one's. 0: not known.
	Order uint64 `json:"order,omitempty"`
	// Where the node was when the row was written.
	Region string     `json:"region,omitempty"`
	Zone   string     `json:"zone,omitempty"`
	NodeIP netip.Addr `json:"node_ip,omitzero"`
}

// resume makes Next a moment of this process's clock: a record of a clock that stood
// elsewhere neither drains for ever nor starts anew.
func (r *record) resume(now time.Time) {
	if r.Phase == draining {
		r.Next = now.Add(max(min(r.Next.Sub(now), cmp.Or(max(r.Drain, 0), defaultGrace)), 0))
	}
}

// phase is how far a pod has got with leaving (contract 13.3).
type phase string

const (
	alive     phase = ""
	draining  phase = "draining"  // its row says DRAINING
	closing   phase = "closing"   // its row says UNHEALTHY
	withdrawn phase = "withdrawn" // it has no row
)

// check says why a record cannot be one.
func (r *record) check() error {
	switch {
	case r.Version < 1:
		return errors.New("it has no version")
	case r.Phase != alive && r.Phase != draining && r.Phase != closing && r.Phase != withdrawn:
		return fmt.Errorf("phase %.20q is none", r.Phase)
	}
	if _, ok := registrypb.ServiceEndpoint_Health_value[r.Health]; !ok {
		return fmt.Errorf("health %.20q is none", r.Health)
	}
	return r.Pod.check()
}

// check says what is missing of a pod (contract 3.8).
func (p *Pod) check() error {
	for _, f := range []struct{ name, value string }{
		{"name", p.Name}, {"namespace", p.Namespace}, {"network_namespace", p.NetNS}, {"container_id", p.ContainerID},
	} {
		if f.value == "" {
			return fmt.Errorf("%s is empty", f.name)
		}
	}
	if !plainName(p.ContainerID) {
		return fmt.Errorf("container_id %.80q is none: letters, digits, '.', '_' and '-', %d at most", p.ContainerID, maxContainer)
	}
	if !filepath.IsAbs(p.NetNS) || strings.ContainsRune(p.NetNS, 0) {
		return fmt.Errorf("network_namespace %.80q is no absolute path", p.NetNS)
	}
	if len(p.Volumes) > maxVolumes {
		return fmt.Errorf("volumes are %d, and a pod has %d at most", len(p.Volumes), maxVolumes)
	}
	for _, ip := range p.IPs {
		if !ip.IsValid() || ip.IsUnspecified() || ip.IsMulticast() || ip.Zone() != "" {
			return fmt.Errorf("ip %q is no address of a pod", ip)
		}
	}
	return nil
}

// plainName: safe as a file's name.
func plainName(s string) bool {
	if s == "" || len(s) > maxContainer || s[0] == '.' {
		return false
	}
	for i := range len(s) {
		switch c := s[i]; {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '.', c == '_', c == '-':
		default:
			return false
		}
	}
	return true
}

// store keeps a file a pod, each whole or not there (contract 13.1).
type store struct {
	dir  string
	open func(path string) (*os.File, error) // os.Open, but for tests
}

// damaged is a file that is no record, or cannot be read.
type damaged struct {
	path   string // where it has been put
	err    error
	unread bool // what it says is not known now: it stays where it is
}

// load reads every record. Files that are none are put aside and told; those that cannot be
// read now, as for want of descriptors, are told and stay.
func (s store) load() (records []record, bad []damaged, err error) {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, nil, fmt.Errorf("the pods' directory: %w", err)
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, nil, fmt.Errorf("the pods' directory: %w", err)
	}
	for _, e := range entries {
		path := filepath.Join(s.dir, e.Name())
		name, ok := strings.CutSuffix(e.Name(), recordSuffix)
		if !ok || !e.Type().IsRegular() || strings.HasPrefix(e.Name(), temporary) {
			continue
		}
		r, err := s.read(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue // removed meanwhile, by the process that leads the pods
		}
		if err == nil && r.ContainerID != name {
			err = fmt.Errorf("it is of container %.80q", r.ContainerID)
		}
		_, unread := errors.AsType[*fs.PathError](err) // of the file system, and not of what is written there
		switch {
		case unread:
			bad = append(bad, damaged{path, err, true})
		case err != nil:
			d := damaged{path: path + damagedSuffix, err: err}
			if mv := os.Rename(path, d.path); mv != nil {
				d.path, d.err = path, errors.Join(err, mv)
			}
			bad = append(bad, d)
		case len(records) >= maxPods:
			bad = append(bad, damaged{path: path, err: fmt.Errorf("a node has at most %d pods: it is not read", maxPods)})
		default:
			records = append(records, r)
		}
	}
	return records, bad, nil
}

// tidy removes what is left of processes that ended in a write. No other process may be in one.
func (s store) tidy() {
	left, _ := filepath.Glob(filepath.Join(s.dir, temporary+"*")) // a pattern that is none finds none
	for _, path := range left {
		_ = os.Remove(path)
	}
}

// same reports whether two records are written alike.
func (r *record) same(o *record) bool {
	a, errA := json.Marshal(r)
	b, errB := json.Marshal(o)
	return errA == nil && errB == nil && bytes.Equal(a, b)
}

func (s store) read(path string) (r record, err error) {
	open := os.Open
	if s.open != nil {
		open = s.open
	}
	f, err := open(path)
	if err != nil {
		return r, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRecord+1))
	switch {
	case err != nil:
		return r, err
	case len(b) > maxRecord:
		return r, fmt.Errorf("it is larger than %d bytes", maxRecord)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	if err := d.Decode(&r); err != nil {
		return r, err
	}
	if d.More() {
		return r, errors.New("something follows the record")
	}
	return r, r.check()
}

// temporary begins the names of files that are not whole.
const temporary = ".new-"

// put writes a record; after a crash the old one or the new one is there.
func (s store) put(r *record) (err error) {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if len(b) > maxRecord {
		return fmt.Errorf("remember the pod: its annotations and labels take %d bytes, more than %d", len(b), maxRecord)
	}
	f, err := os.CreateTemp(s.dir, temporary)
	if err != nil {
		return fmt.Errorf("remember the pod: %w", err)
	}
	_, err = f.Write(append(b, '\n'))
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), s.path(r.ContainerID))
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("remember the pod: %w", err)
	}
	return s.sync()
}

// drop removes a record; one that is not there is no error.
func (s store) drop(container string) error {
	if err := os.Remove(s.path(container)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("forget the pod: %w", err)
	}
	return s.sync()
}

// sync makes names that changed last.
func (s store) sync() error {
	d, err := os.Open(s.dir)
	if err != nil {
		return fmt.Errorf("the pods' directory: %w", err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("the pods' directory: %w", err)
	}
	return nil
}

func (s store) path(container string) string { return filepath.Join(s.dir, container+recordSuffix) }
