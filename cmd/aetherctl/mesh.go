package main

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"aether/controlplane/compile"
	"aether/controlplane/file"
	"aether/controlplane/input"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// Bounds of a configuration that is one file, in bytes; the file source bounds what it
// reads of a directory.
const (
	maxConfig = 256 << 20
	maxPart   = 8 << 20
)

// What is kept of a mesh at a time. Where a node's view is gone, making it again costs what its
// pods cost and one pass over the services; where its place is gone, a compile.
const (
	maxViews  = 16
	maxPlaces = 8
)

// meshFlags say how a configuration is read. Empty: what a snapshot says in its first
// line, else the defaults.
type meshFlags struct{ node, domain, trust string }

func (o *meshFlags) add(c *cobra.Command, with string) {
	c.Flags().StringVar(&o.node, "node", "", with+"the node whose pods are local; default: the node of the pod that is asked about")
	c.Flags().StringVar(&o.domain, "mesh-domain", "", with+"domain of mesh names; default: what a snapshot says, else "+model.DefaultDomain)
	c.Flags().StringVar(&o.trust, "trust-domain", "", with+"SPIFFE trust domain; default: what a snapshot says, else the mesh domain")
}

// mesh is a configuration on disk, and the views that nodes have of it.
type mesh struct {
	name string // as the user gave it, for messages
	dir  string
	o    meshFlags
	errs io.Writer
	done func() // removes what openMesh made

	views  *file.Views
	pods   []model.Endpoint      // every pod that has a row
	nodeOf map[netip.Addr]string // of those that run on one

	locals map[string]local                  // by node, of those that were asked about
	places recent[[2]string, *compile.Index] // by region and zone, which endpoints are ranked by
	nodes  recent[string, *snapshot.Snapshot]
	told   map[string]bool // problems that were printed
}

// local is what a node has for itself.
type local struct {
	place     [2]string
	workloads []model.Workload
}

// snapshotHead is the first line of what 'aetherctl snapshot' prints.
var snapshotHead = regexp.MustCompile(`^# The mesh as node "([^"]*)" has it \(mesh domain "([^"]*)", trust domain "([^"]*)"\)`)

// openMesh gets the configuration called path: a directory, a file, or - for in. What is not in
// force of it is told on errs. close has to be called.
func openMesh(path string, in io.Reader, o meshFlags, errs io.Writer) (*mesh, error) {
	m := &mesh{name: path, dir: path, o: o, errs: errs, done: func() {},
		nodeOf: map[netip.Addr]string{}, locals: map[string]local{}, told: map[string]bool{}}
	m.places.most, m.nodes.most = maxPlaces, maxViews
	if err := m.open(path, in); err != nil {
		m.close()
		if p, ok := errors.AsType[*os.PathError](err); ok {
			err = p.Err
		}
		return nil, fmt.Errorf("configuration %s: %w", path, err)
	}
	m.views = file.LoadViews(m.dir, file.Options{Domain: m.o.domain, TrustDomain: m.o.trust, RedirectAllDefault: true})
	all, _ := m.views.Mesh("")
	m.pods = all.Endpoints
	for i := range m.pods {
		if p := &m.pods[i]; p.Node != "" && m.nodeOf[p.IP] == "" {
			m.nodeOf[p.IP] = p.Node
		}
	}
	s := m.load(m.o.node)
	if len(m.pods) == 0 && len(s.Services()) == 0 {
		m.close()
		return nil, fmt.Errorf("configuration %s: there is no pod and no service of the mesh in it; it is a directory of YAML files, or one file such as 'aetherctl snapshot' prints", path)
	}
	return m, nil
}

// open makes m.dir the directory to read.
func (m *mesh) open(path string, in io.Reader) error {
	if path != "-" {
		info, err := os.Stat(path)
		if err != nil || info.IsDir() {
			return err
		}
	}
	// The source reads directories: this file becomes the only one of one.
	dir, err := os.MkdirTemp("", "aetherctl-")
	if err != nil {
		return err
	}
	m.dir, m.done = dir, func() { _ = os.RemoveAll(dir) }
	src, name := in, filepath.Base(path)
	if path == "-" {
		name = "stdin"
	} else {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		src = f
	}
	if ext := filepath.Ext(name); ext != ".yaml" && ext != ".yml" {
		name += ".yaml"
	}
	head, err := copyParts(filepath.Join(dir, strings.TrimLeft(name, ".")), src)
	if err != nil {
		return err
	}
	if says := snapshotHead.FindStringSubmatch(head); says != nil {
		for i, to := range []*string{&m.o.node, &m.o.domain, &m.o.trust} {
			if *to == "" {
				*to = says[i+1]
			}
		}
	}
	return nil
}

// copyParts writes src to name, and what is beyond maxPart, from the next document on, to files that
// come after it in order: the source bounds a file, and a snapshot of a big mesh is larger. It
// returns the first line.
func copyParts(name string, src io.Reader) (head string, err error) {
	r := bufio.NewReader(io.LimitReader(src, maxConfig+1))
	var dst *os.File
	total, size := 0, 0
	for part := 1; ; {
		line, err := r.ReadSlice('\n') // of a very long line a piece, which begins no document
		if total == 0 {
			head = string(line)
		}
		if dst == nil || size > maxPart && string(line) == "---\n" {
			if dst != nil {
				if err := dst.Close(); err != nil {
					return "", err
				}
			}
			path := name
			if part > 1 {
				path = fmt.Sprintf("%s.%04d.yaml", name, part)
			}
			size, part = 0, part+1
			f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_EXCL, 0o600)
			if err != nil {
				return "", err
			}
			dst = f
		}
		total, size = total+len(line), size+len(line)
		if total > maxConfig {
			err = fmt.Errorf("larger than %d MiB", maxConfig>>20)
		} else if _, werr := dst.Write(line); werr != nil {
			err = werr
		}
		if err == io.EOF {
			return head, dst.Close()
		}
		if err != nil && err != bufio.ErrBufferFull {
			dst.Close()
			return "", err
		}
	}
}

func (m *mesh) close() { m.done() }

// load gives a node's view. "" is a node that no pod is on.
func (m *mesh) load(node string) *snapshot.Snapshot {
	if s, ok := m.nodes.get(node); ok {
		return s
	}
	l, known := m.locals[node]
	var reported []model.Problem
	if !known {
		in, problems := m.views.Mesh(node)
		l.workloads = in.Workloads
		if in.Region != "" { // a zone alone ranks nothing
			l.place = [2]string{in.Region, in.Zone}
		}
		m.locals[node] = l
		reported = problems
	}
	x, ok := m.places.get(l.place)
	if ok {
		x.SetWorkloads(l.workloads)
	} else {
		in, _ := m.views.Mesh(node)
		x = compile.NewIndex(in)
		m.places.put(l.place, x)
	}
	s, problems := x.Update()
	if !known {
		m.tell(input.Problems(reported, problems))
	}
	m.nodes.put(node, s)
	return s
}

// tell prints the problems that were not yet.
func (m *mesh) tell(problems []model.Problem) {
	for _, p := range problems {
		if t := problemText(p); !m.told[t] {
			m.told[t] = true
			fmt.Fprintln(m.errs, "not in force:", t)
		}
	}
}

// of gives the view of the node that has a pod of who.
func (m *mesh) of(who model.ServiceName) (*snapshot.Snapshot, error) {
	if m.o.node != "" {
		return m.load(m.o.node), nil
	}
	accounts := map[string]bool{}
	for i := range m.pods {
		if m.pods[i].Service == who {
			return m.load(m.pods[i].Node), nil
		}
		accounts[m.pods[i].Service.String()] = true
	}
	const most = 20
	known := slices.Sorted(maps.Keys(accounts))
	if len(known) > most {
		known = append(known[:most], fmt.Sprintf("and %d more", len(known)-most))
	}
	return nil, fmt.Errorf("%s has no pod in %s; the ServiceAccounts that have are %s. Name one of them, or with --node the node to explain for",
		who, m.name, strings.Join(known, ", "))
}

// at gives the pod that has an address, in its node's view; nil: no pod of the mesh has it.
func (m *mesh) at(a netip.Addr) (*snapshot.Snapshot, *snapshot.Workload) {
	s := m.load(cmp.Or(m.o.node, m.nodeOf[a]))
	for _, w := range s.Workloads() {
		if w.Owns(a) {
			return s, w
		}
	}
	return nil, nil
}

func problemText(p model.Problem) string {
	s := p.Object + ": " + p.Reason
	if p.Where != "" {
		s = p.Where + ": " + s
	}
	return s
}

// recent keeps the values that were asked for last, most of them.
type recent[K comparable, V any] struct {
	most int
	list []kept[K, V] // the last one first
}

type kept[K comparable, V any] struct {
	key   K
	value V
}

func (r *recent[K, V]) get(k K) (v V, ok bool) {
	i := slices.IndexFunc(r.list, func(e kept[K, V]) bool { return e.key == k })
	if i < 0 {
		return v, false
	}
	e := r.list[i]
	copy(r.list[1:], r.list[:i])
	r.list[0] = e
	return e.value, true
}

// put keeps a value that get does not have.
func (r *recent[K, V]) put(k K, v V) {
	if len(r.list) < r.most {
		r.list = append(r.list, kept[K, V]{})
	}
	copy(r.list[1:], r.list)
	r.list[0] = kept[K, V]{k, v}
}
