// Package local is the life of this node's own pods (contract 6.6 and 13): from the
// CNI plugin's call to its last, through probes, promotion, draining and the sweep.
//
//   - A pod is on disk before anything else knows of it, and off it before anything
//     else forgets it: a restart needs no server, and nothing comes back.
//   - A row becomes healthy only when the application answers and the inbound listener
//     has a certificate. A pod that leaves never becomes healthy again.
//   - What the registry does not take is tried again boundedly, and then left to the
//     sweep; no call of the plugin fails for it.
//   - Rows of one address are written one after the other, the last word last.
//
// It knows nothing of Kubernetes' client, of gRPC or of the data plane: those are given to it.
package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"aether/controlplane/endpointmeta"
	"aether/controlplane/input"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/dataplane/telemetry"
	"aether/mtls/spiffeid"
	"aether/tproxy/rules"
)

// Times of a pod's life.
const (
	probeInterval = 5 * time.Second  // contract 6.6, with or without traffic
	probeTimeout  = time.Second      // contract 6.6
	unhealthAfter = 2                // failures in a row; one success is enough for the contrary
	firstSight    = 15 * time.Second // contract 13.2: an active-mode pod's failing probe means nothing yet
	ackWait       = 2 * time.Second  // contract 13.1, 13.3: for the data plane, and the first write of the row
	leastDrain    = 2 * time.Second  // contract 13.3
	preStopSpare  = time.Second      // contract 13.3: UNHEALTHY comes this long before preStop ends
	graceSpare    = 2 * time.Second  // contract 13.3: and this long before the pod is killed
	defaultGrace  = 30 * time.Second // of a pod of which only its deletion is known
	askWait       = 2 * time.Second  // for what the API server has of a pod that is added: the plugin gives up after 5 s

	maxPods   = 1024 // of a node: four times what a kubelet takes
	maxProbes = 64   // at once
	maxEarly  = 1024 // pods that leave and are not here yet
)

// Pod is what the CNI plugin and the API server say of a pod (contract 3.8).
type Pod struct {
	Namespace   string            `json:"namespace"`
	Name        string            `json:"name"`
	UID         string            `json:"uid,omitempty"`
	Account     string            `json:"service_account"` // empty: "default"
	ContainerID string            `json:"container_id"`
	NetNS       string            `json:"network_namespace"` // path
	IPs         []netip.Addr      `json:"ips"`
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	// Volumes of its spec; nil: whoever told of it does not know them (decision 035).
	Volumes     []Volume `json:"volumes,omitzero"`
	Terminating bool     `json:"terminating,omitempty"` // its deletion timestamp is set
}

// Volume is a volume that a pod declares.
type Volume struct {
	Name   string `json:"name"`
	Driver string `json:"csi_driver,omitempty"` // of an inline csi volume; empty: it is of another kind
}

// Place is where this node is.
type Place struct {
	Cluster, Node string     // their names
	Region, Zone  string     // empty: not known, or none
	NodeIP        netip.Addr // invalid: not known
}

// Result of Add, as the plugin is answered (contract 3.8).
type Result uint8

// The results; an error stands for ERROR.
const (
	Success Result = 1
	Ignored Result = 3 // none of the mesh's: nothing is to be installed
)

// Termination is how a pod leaves (contract 13.3).
type Termination struct {
	// PreStop is the longest preStop.sleep of its containers; an exec counts as none.
	PreStop time.Duration
	// Grace is its terminationGracePeriodSeconds; 0 or less: it is killed at once.
	Grace time.Duration
}

// delay is from DRAINING to UNHEALTHY.
func (t Termination) delay() time.Duration {
	return max(min(max(leastDrain, t.PreStop-preStopSpare), t.Grace-graceSpare), 0)
}

// Registry takes the node's rows. Calls are bounded by their context alone.
type Registry interface {
	// Register writes a row under one of its classes.
	Register(ctx context.Context, service model.ServiceName, class registrypb.Service_Protocol, e *registrypb.ServiceEndpoint) error
	// Unregister takes an address from every class of the service, unless by is no longer
	// what holds (registry.Statement.Keeps). What is not there is no error.
	Unregister(ctx context.Context, service model.ServiceName, ip string, by registry.Statement) error
	// OfNode are all rows whose node_name is node. registry.ErrDerived: what was registered
	// cannot be found in it. Any other error: it is not known which there are.
	OfNode(ctx context.Context, node string) ([]registry.Row, error)
}

// Config: every field says what its zero value means.
type Config struct {
	Dir         string // required: of the pods' records (upstream: /var/lib/aether/registry)
	Place       Place  // Cluster and Node are required; the rest may come by SetPlace
	TrustDomain string // required
	// Identities are the forms of those that rows may name (registry.IdentityFault): a pod
	// whose row other nodes do not take is reported. nil: its namespace's alone.
	Identities []string
	Registry   Registry   // required
	Sink       input.Sink // required: workloads, and what is wrong with them
	// Probe asks a pod's application; required (see Prober).
	Probe func(ctx context.Context, t Target) error
	// Certificate: the pod's inbound listener can shake hands; required.
	Certificate func(container string) bool
	// Served waits until the data plane serves the pod, or does so no longer. nil: not waited for.
	Served func(ctx context.Context, container string, served bool) error
	// Cluster is asked which pods there are. nil: only storage and namespaces are known.
	Cluster Cluster
	// EvictLost: pods of Cluster's that live, and whose add was lost, are evicted.
	EvictLost bool
	// NetNS tells whether a path leads to a network namespace; netns.ErrGone: it does not. nil: netns.Open.
	NetNS func(path string) error

	RedirectAllDefault bool // capture of pods that do not say
	Log                *slog.Logger
}

// Pods are the pods of this node. Safe for concurrent use.
type Pods struct {
	cfg    Config
	log    *slog.Logger
	quiet  *telemetry.LogLimiter // once a minute and cause
	rarely *telemetry.LogLimiter // once an hour, what every sweep may find again
	store  store

	probes chan struct{} // a place each
	writes chan struct{} // a place each
	resync chan struct{} // of one

	mu    sync.Mutex
	ctx   context.Context // of Run; nil: not running
	wg    sync.WaitGroup  // added to only while ctx is set
	place Place
	moved bool            // place has been said since the records were read
	pods  map[string]*pod // by container
	order uint64          // of the pod that came last
	said  uint64          // when the last statement was made, or one of this node's that was listed
	rows  map[rowKey]*row
	lost  map[string]*lostPod    // live pods that are not here, by UID or name
	early map[string]Termination // of managed pods that leave and are not here, by UID; see Leaving
	ended bool                   // Run has: the pods are another process's

	clusterTold bool // it is a problem that Cluster's pods are not known; the sweep's own

	views sync.Map // container → *view: for whoever may not wait

	// Counts, named after contract 14.4.
	Counts Counts
}

// view is what of a pod is read without the lock.
type view struct {
	namespace, name string
	answers         atomic.Bool // the application, by the thresholds
}

// pod is one pod of the node. Pods.mu guards it.
type pod struct {
	rec     record
	meta    endpointmeta.Meta
	service model.ServiceName
	id      string // SPIFFE ID
	work    model.Workload
	fault   error  // why it is not served, of a record whose annotations are bad; nil: it is
	foreign string // why other nodes do not take its row although it is served; empty: they do
	view    *view
	cancel  context.CancelFunc // of its probe; nil: none runs
	timer   *time.Timer        // to its next phase
	seen    time.Time          // first, by this process
	waits   time.Time          // since when for its promotion; zero: it does not

	app, row thresholds // of the application alone, and with the certificate
	stale    int        // sweeps that did not find its namespace
	settled  bool       // it was there at an earlier sweep
}

func (p *pod) name() string { return p.rec.Namespace + "/" + p.rec.Name }

func (p *pod) key() rowKey { return rowKey{p.service, p.rec.IPs[0].Unmap().String()} }

func (p *pod) health() registrypb.ServiceEndpoint_Health {
	return registrypb.ServiceEndpoint_Health(registrypb.ServiceEndpoint_Health_value[p.rec.Health])
}

// thresholds make a state of probes (contract 6.6): one success, or two failures.
type thresholds struct {
	ok    bool
	fails int
}

func (t *thresholds) observe(ok bool) bool {
	if ok {
		t.ok, t.fails = true, 0
		return true
	}
	if t.fails = min(t.fails+1, unhealthAfter); t.fails == unhealthAfter {
		t.ok = false
	}
	return t.ok
}

// New loads what is on disk and says it to the sink, without any server (contract
// 13.6). Nothing runs before Run. The error is of a directory that cannot be used.
func New(c Config) (*Pods, error) {
	if c.Dir == "" || c.Place.Cluster == "" || c.Place.Node == "" || c.TrustDomain == "" || c.Registry == nil || c.Sink == nil ||
		c.Probe == nil || c.Certificate == nil {
		return nil, errors.New("local pods: Dir, Place, TrustDomain, Registry, Sink, Probe and Certificate are required")
	}
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.NetNS == nil {
		c.NetNS = checkNetNS
	}
	l := &Pods{
		cfg: c, log: c.Log, quiet: telemetry.NewLogLimiter(c.Log, time.Minute, nil), rarely: telemetry.NewLogLimiter(c.Log, time.Hour, nil), store: store{dir: c.Dir}, place: c.Place,
		probes: make(chan struct{}, maxProbes), writes: make(chan struct{}, maxWrites), resync: make(chan struct{}, 1),
		pods: map[string]*pod{}, rows: map[rowKey]*row{}, lost: map[string]*lostPod{},
		early: map[string]Termination{},
	}
	records, bad, err := l.store.load()
	if err != nil {
		return nil, err
	}
	batch := input.Batch{Tables: input.Tables{Workloads: map[string][]model.Workload{}, Problems: map[string][]model.Problem{}}}
	l.takeLocked(records, bad, &batch) // nobody else has l yet
	c.Sink.Replace(batch)
	c.Sink.Report(input.Status{Connected: true, Since: time.Now()})
	return l, nil
}

// takeLocked takes what is on disk, and adds to batch what the sink is to be told of it.
func (l *Pods) takeLocked(records []record, bad []damaged, batch *input.Batch) {
	for _, d := range bad {
		if d.unread {
			l.Counts.StorageErrors.Inc()
			l.log.Error("a pod's record cannot be read now; the pod is not served until this process is started again, or the pod is made anew", "file", d.path, "err", d.err)
			batch.Problems["record "+d.path] = []model.Problem{{Object: "Pod record", Where: d.path, Reason: d.err.Error() + "; the pod is served once this process is started again, or the pod is made anew"}}
			continue
		}
		l.log.Error("a pod's record cannot be read and is set aside; the pod is not served", "file", d.path, "err", d.err)
		batch.Problems["record "+d.path] = []model.Problem{{Object: "Pod record", Where: d.path, Reason: d.err.Error() + "; the pod is served again once it is made anew"}}
		l.Counts.DamagedRecords.Inc()
	}
	for _, r := range records { // where the node is is known before any server answers
		l.place.Region, l.place.Zone = cmp.Or(l.place.Region, r.Region), cmp.Or(l.place.Zone, r.Zone)
		l.place.NodeIP = cmp.Or(l.place.NodeIP, r.NodeIP)
		l.order = max(l.order, r.Order)
	}
	for _, r := range records {
		r.resume(time.Now())
		p := l.make(r)
		l.pods[r.ContainerID] = p
		l.views.Store(r.ContainerID, p.view)
		if p.fault != nil {
			l.log.Error("a pod on disk cannot be served", "pod", p.name(), "container", r.ContainerID, "err", p.fault)
		}
		batch.Problems[problemKey(r.ContainerID)] = p.problems()
		if p.fault == nil {
			batch.Workloads[r.ContainerID] = []model.Workload{p.work}
		}
	}
}

// inheritLocked takes what the process that led the pods until now has left on disk since New
// read it. What cannot be read leaves everything as it is.
func (l *Pods) inheritLocked() {
	l.store.tidy()
	records, bad, err := l.store.load()
	if i := slices.IndexFunc(bad, func(d damaged) bool { return d.unread }); err == nil && i >= 0 {
		err = bad[i].err
	}
	if err != nil {
		l.Counts.StorageErrors.Inc()
		l.log.Error("what there is of the pods on disk cannot be read again: what it was at the start counts", "err", err)
		return
	}
	batch := input.Batch{Tables: input.Tables{Workloads: map[string][]model.Workload{}, Problems: map[string][]model.Problem{}}}
	there := make(map[string]bool, len(records))
	anew := records[:0]
	for _, r := range records {
		there[r.ContainerID] = true
		if p := l.pods[r.ContainerID]; p == nil || !p.rec.same(&r) {
			anew = append(anew, r)
		}
	}
	at := l.place
	l.takeLocked(anew, bad, &batch)
	if l.moved {
		l.place = at
	}
	for c := range l.pods {
		if !there[c] {
			delete(l.pods, c)
			l.views.Delete(c)
			batch.Workloads[c], batch.Problems[problemKey(c)] = nil, nil
		}
	}
	if !batch.Empty() {
		l.cfg.Sink.Apply(batch)
	}
}

func problemKey(container string) string { return "pod " + container }

// make reads what a record says.
func (l *Pods) make(r record) *pod {
	if r.Order == 0 {
		l.order++
		r.Order = l.order
	}
	p := &pod{rec: r, seen: time.Now(), view: &view{namespace: r.Namespace, name: r.Name}}
	p.fault = l.read(p)
	p.app.ok = p.health() == registrypb.ServiceEndpoint_HEALTHY
	p.row.ok = p.app.ok
	p.view.answers.Store(p.app.ok)
	return p
}

// read makes of p's record what it says: a workload and the facts of its row.
func (l *Pods) read(p *pod) error {
	r := &p.rec
	if len(r.IPs) == 0 {
		return errors.New("it has no address")
	}
	account := cmp.Or(r.Account, "default") // as admission does
	p.service = model.ServiceName{Namespace: r.Namespace, Name: account}
	meta, err := endpointmeta.Parse(r.Namespace, r.Name, r.Annotations)
	if err != nil {
		return err
	}
	id := meta.SPIFFEID
	if id == "" {
		x, err := spiffeid.ForServiceAccount(l.cfg.TrustDomain, r.Namespace, account)
		if err != nil {
			return fmt.Errorf("pod %s has no identity: %w", p.name(), err)
		}
		id = x.String()
	}
	p.meta, p.id = meta, id
	row, err := l.describe(p)
	if err != nil {
		return err
	}
	_, p.foreign = registry.IdentityFault(p.service, l.cfg.TrustDomain, row, l.cfg.Identities...)
	capture, _ := rules.ParseAnnotations(r.Annotations, l.cfg.RedirectAllDefault)
	p.work = model.Workload{
		Namespace: r.Namespace, Name: r.Name, Account: account, ContainerID: r.ContainerID, NetNS: r.NetNS, IPs: r.IPs,
		SPIFFEID: p.id, DefaultPort: meta.DefaultPort, Ports: meta.Ports, Upstreams: meta.Upstreams,
		Capture: model.Capture{RedirectAll: capture.RedirectAll, ExcludePorts: capture.ExcludePorts, ExcludeRanges: capture.ExcludeRanges},
		UID:     r.UID, Volumes: volumesOf(r.Volumes), UDSSocket: meta.UDSSocket,
	}
	return nil
}

// volumesOf keeps it that none are known.
func volumesOf(in []Volume) []model.Volume {
	if in == nil {
		return nil
	}
	out := make([]model.Volume, len(in))
	for i, v := range in {
		out[i] = model.Volume(v)
	}
	return out
}

// describe is p's row, but for its health. The error is of what nobody would take
// (contract 9.3), or that nobody could reach.
func (l *Pods) describe(p *pod) (*registrypb.ServiceEndpoint, error) {
	at := registry.Local{ContainerID: p.rec.ContainerID, NetNS: p.rec.NetNS, NodeIP: l.place.NodeIP, Check: registrypb.ServiceEndpoint_EDS}
	if p.meta.HealthCheck == endpointmeta.HealthActive {
		at.Check = registrypb.ServiceEndpoint_ACTIVE
	}
	e := registry.Encode(l.cfg.TrustDomain, &model.Endpoint{
		Service: p.service, IP: p.rec.IPs[0], Pod: p.rec.Name, Node: l.place.Node, Cluster: l.place.Cluster, Region: l.place.Region, Zone: l.place.Zone,
		DefaultPort: p.meta.DefaultPort, Ports: p.meta.Ports, Weight: p.meta.Weight, SPIFFEID: p.id, Metadata: p.meta.Metadata,
	}, at)
	if _, why := registry.RowFault(e); why != "" {
		return nil, fmt.Errorf("it has no valid row: %s", why)
	}
	if len(registry.Ports(e)) == 0 {
		return nil, errors.New("it declares no port that can be dialled: write one of 1 to 65535 in endpoint.aether.io/port or ports")
	}
	return e, nil
}

// problems are what of p is not, or not wholly, in force.
func (p *pod) problems() []model.Problem {
	var out []model.Problem
	say := func(format string, args ...any) {
		out = append(out, model.Problem{Object: "Pod " + p.name(), Reason: fmt.Sprintf(format, args...)})
	}
	if p.fault != nil {
		say("it is not served: %v", p.fault)
	}
	if p.foreign != "" {
		say("annotation %s: other nodes do not take its row: %s", endpointmeta.KeySPIFFEID, p.foreign)
	}
	for _, n := range p.meta.Notes {
		say("annotation %s: %q: %s", n.Key, n.Value, n.Reason)
	}
	_, bad := rules.ParseAnnotations(p.rec.Annotations, false)
	for _, b := range bad {
		say("annotation %s: %q: %s", b.Annotation, b.Entry, b.Reason)
	}
	return out
}

// Run leads the pods, which it reads from disk again first: it probes, writes and sweeps until
// ctx ends; everything it began has ended when it returns. Only one process may do so at a time
// (contract 13.5), and one that has done so takes no call any more.
func (l *Pods) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	l.mu.Lock()
	if l.ctx != nil || l.ended {
		l.mu.Unlock()
		return errors.New("local pods: they run already, or have run")
	}
	l.inheritLocked()
	l.ctx = ctx
	if l.moved {
		l.moveLocked()
	}
	for _, p := range l.pods {
		l.beginLocked(p)
		if p.rec.Phase != alive && p.fault == nil {
			l.settleLocked(p.key(), true) // whatever the process before got done of it
		}
	}
	for _, r := range l.rows {
		l.writeLocked(r)
	}
	l.mu.Unlock()

	l.sweeps(ctx)

	l.mu.Lock()
	l.ctx, l.ended = nil, true
	for _, p := range l.pods {
		l.endLocked(p)
	}
	l.mu.Unlock()
	l.wg.Wait()
	return nil
}

// beginLocked starts what p needs while Run runs.
func (l *Pods) beginLocked(p *pod) {
	if l.ctx == nil || p.fault != nil {
		return
	}
	if p.cancel == nil {
		ctx, cancel := context.WithCancel(l.ctx)
		p.cancel = cancel
		l.wg.Go(func() { l.watch(ctx, p) })
	}
	if p.rec.Phase == draining && p.timer == nil {
		p.timer = time.AfterFunc(time.Until(p.rec.Next), func() { l.close(p) })
	}
}

// endLocked ends it.
func (l *Pods) endLocked(p *pod) {
	if p.cancel != nil {
		p.cancel()
		p.cancel = nil
	}
	if p.timer != nil {
		p.timer.Stop()
		p.timer = nil
	}
}

// Add takes a pod, or takes it again (contract 13.1). It returns once the pod is on
// disk and the data plane serves it, or has been waited for. The error says what of the
// call, or of the pod's annotations, is wrong, or that nothing can be kept on disk; what
// the registry says is never one.
func (l *Pods) Add(ctx context.Context, in Pod) (Result, error) {
	if err := in.check(); err != nil {
		return 0, fmt.Errorf("add pod %s/%s: %w", in.Namespace, in.Name, err)
	}
	if endpointmeta.Ignorable(in.Namespace, in.Labels, len(in.IPs)) {
		return Ignored, nil
	}
	p, fresh, err := l.add(in)
	if err != nil {
		return 0, fmt.Errorf("add pod %s/%s: failed to build endpoint: %w", in.Namespace, in.Name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, ackWait)
	defer cancel()
	if fresh {
		l.log.Info("pod added", "pod", in.Namespace+"/"+in.Name, "container", in.ContainerID, "service", p.service, "netns", in.NetNS)
	}
	l.acknowledge(ctx, p, true)
	return Success, nil
}

// errEnded is of a call to a process that leads the pods no more.
var errEnded = errors.New("another process of this node leads its pods by now: ask that one")

// AddNamed is Add for a caller that knows a pod by its names, its namespace and its addresses
// alone, as the CNI plugin does (contract 3.8): everything else is what the API server has of
// it (contract 13.1), whatever in says. A pod that cannot be asked for fails the call.
func (l *Pods) AddNamed(ctx context.Context, in Pod) (Result, error) {
	fail := func(err error) (Result, error) {
		return 0, fmt.Errorf("add pod %s/%s: %w", in.Namespace, in.Name, err)
	}
	if err := in.check(); err != nil {
		return fail(err)
	}
	if endpointmeta.IgnoredNamespace(in.Namespace) || len(in.IPs) == 0 {
		return Ignored, nil // whoever makes the API server answer again may be among these
	}
	if l.cfg.Cluster == nil {
		return fail(errors.New("there is no API server that could be asked for it"))
	}
	ask, cancel := context.WithTimeout(ctx, askWait)
	defer cancel()
	has, err := l.cfg.Cluster.Pod(ask, in.Namespace, in.Name)
	if err != nil {
		return fail(fmt.Errorf("ask the API server for it: %w", err))
	}
	if in.UID != "" && in.UID != has.UID {
		return fail(errors.New("another pod has its name by now"))
	}
	in.UID, in.Account, in.Labels, in.Annotations, in.Volumes, in.Terminating = has.UID, has.Account, has.Labels, has.Annotations, has.Volumes, has.Terminating
	return l.Add(ctx, in)
}

func (l *Pods) add(in Pod) (p *pod, fresh bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return nil, false, errEnded
	}
	leaves, early := l.early[in.UID]
	early = early && in.UID != ""
	in.Terminating = in.Terminating || early
	old := l.pods[in.ContainerID]
	if old == nil && len(l.pods) >= maxPods {
		return nil, false, fmt.Errorf("a node has at most %d pods", maxPods)
	}
	rec := record{
		Version: recordVersion, Pod: in, Health: registrypb.ServiceEndpoint_HEALTH_UNSPECIFIED.String(),
		Region: l.place.Region, Zone: l.place.Zone, NodeIP: l.place.NodeIP,
	}
	if old != nil { // a re-sent call demotes nobody, and brings nobody back who leaves
		rec.Health, rec.Phase, rec.Next, rec.Drain, rec.Order = old.rec.Health, old.rec.Phase, old.rec.Next, old.rec.Drain, old.rec.Order
		rec.Terminating = in.Terminating || old.rec.Terminating
	}
	p = l.make(rec)
	if p.fault != nil {
		return nil, false, p.fault
	}
	if old == nil {
		if p.meta.HealthCheck == endpointmeta.HealthEDS {
			p.rec.Health = registrypb.ServiceEndpoint_UNHEALTHY.String()
		}
		if in.Terminating {
			p.rec.Phase = withdrawn
		}
		p.waits = p.seen
	}
	if err := l.store.put(&p.rec); err != nil {
		l.Counts.StorageErrors.Inc()
		return nil, false, err
	}
	if old != nil {
		l.endLocked(old)
		p.seen, p.waits, p.app, p.row, p.settled = old.seen, old.waits, old.app, old.row, old.settled
		p.view.answers.Store(p.app.ok)
	}
	l.pods[in.ContainerID] = p
	l.views.Store(in.ContainerID, p.view)
	if old != nil && old.fault == nil && old.key() != p.key() {
		l.settleLocked(old.key(), false)
	}
	l.settleLocked(p.key(), false)
	l.cfg.Sink.Apply(input.Batch{Tables: input.Tables{
		Workloads: map[string][]model.Workload{in.ContainerID: {p.work}},
		Problems: map[string][]model.Problem{
			problemKey(in.ContainerID):                               p.problems(),
			"record " + l.store.path(in.ContainerID):                 nil,
			"record " + l.store.path(in.ContainerID) + damagedSuffix: nil,
		},
	}})
	l.beginLocked(p)
	if old != nil && in.Terminating && p.rec.Phase == alive {
		if !early { // its deletion is known, and how it leaves is not
			leaves = Termination{Grace: defaultGrace}
		}
		l.leaveLocked(p, leaves)
	}
	if early {
		delete(l.early, in.UID)
	}
	return p, old == nil, nil
}

// acknowledge waits until the data plane serves p, or no longer does, and the row has
// been tried to write. It is best effort: what is late is logged, and goes on.
func (l *Pods) acknowledge(ctx context.Context, p *pod, served bool) {
	if l.cfg.Served != nil {
		if err := l.cfg.Served(ctx, p.rec.ContainerID, served); err != nil {
			l.Counts.AckFailures.Inc()
			l.log.Warn("the data plane is late", "pod", p.name(), "container", p.rec.ContainerID, "served", served, "err", err)
		}
	}
	l.awaitRow(ctx, p.key())
}

// Remove forgets a pod, as at the CNI plugin's last call (contract 13.3): its record
// first, so that nothing brings it back; then the data plane; then its row, which the call does
// not wait for beyond 2 s. A container that is not known is no error. The error is
// that of the record, which is then still there, and the pod with it.
func (l *Pods) Remove(ctx context.Context, container string) error {
	p, err := l.remove(container)
	if err != nil {
		return fmt.Errorf("remove container %s: %w", container, err)
	}
	if p == nil || p.fault != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, ackWait)
	defer cancel()
	l.acknowledge(ctx, p, false)
	return nil
}

func (l *Pods) remove(container string) (*pod, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return nil, errEnded
	}
	p := l.pods[container]
	if p == nil {
		return nil, nil
	}
	return p, l.forgetLocked(p)
}

func (l *Pods) forgetLocked(p *pod) error {
	container := p.rec.ContainerID
	if err := l.store.drop(container); err != nil {
		l.Counts.StorageErrors.Inc()
		return err
	}
	delete(l.pods, container)
	l.views.Delete(container)
	l.endLocked(p)
	l.cfg.Sink.Apply(input.Batch{Tables: input.Tables{
		Workloads: map[string][]model.Workload{container: nil},
		Problems:  map[string][]model.Problem{problemKey(container): nil},
	}})
	if p.fault == nil {
		l.settleLocked(p.key(), false)
	}
	l.log.Info("pod removed", "pod", p.name(), "container", container)
	return nil
}

// Terminating begins a pod's end: its row says DRAINING now and UNHEALTHY after a delay
// (contract 13.3). A pod that is killed at once (no grace) loses its row at once, also
// if it drains already. A container that is not known is nobody's.
func (l *Pods) Terminating(container string, t Termination) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.pods[container]
	if p == nil || p.fault != nil || l.ended {
		return
	}
	l.leaveLocked(p, t)
}

// Leaving is Terminating by the API server's word: of every container of the pod, which is
// known by its UID, or by its name where no UID is recorded. One that is gone from there
// loses its row at once: it was killed, or that is not waited for. While Run does not run
// nothing is done: the sweep that begins it knows which pods leave.
func (l *Pods) Leaving(of ClusterPod) {
	if of.Gone {
		of.Termination = Termination{}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx == nil {
		return
	}
	here := false
	for _, p := range l.pods {
		named := p.rec.UID == "" && p.name() == of.name()
		if p.rec.UID != of.UID && !named || p.fault != nil {
			continue
		}
		here = true
		if !(named && of.Gone) { // its name may be another's by now: the sweep asks
			l.leaveLocked(p, of.Termination)
		}
	}
	switch {
	case here, of.Gone, endpointmeta.Ignorable(of.Namespace, of.Labels, 1):
		delete(l.early, of.UID)
	case len(l.early) < maxEarly:
		l.early[of.UID] = of.Termination
	}
}

func (l *Pods) leaveLocked(p *pod, t Termination) {
	switch {
	case t.Grace <= 0 && p.rec.Phase != withdrawn:
		l.enterLocked(p, withdrawn, time.Time{})
	case p.rec.Phase != alive:
	default:
		p.rec.Drain = t.delay()
		l.enterLocked(p, draining, time.Now().Add(p.rec.Drain))
	}
}

// enterLocked brings p into a phase of its end.
func (l *Pods) enterLocked(p *pod, to phase, next time.Time) {
	l.endTimerLocked(p)
	p.rec.Terminating, p.rec.Phase, p.rec.Next = true, to, next
	l.persistLocked(p)
	l.log.Info("pod leaves", "pod", p.name(), "container", p.rec.ContainerID, "phase", string(to))
	l.settleLocked(p.key(), false)
	l.beginLocked(p)
}

func (l *Pods) endTimerLocked(p *pod) {
	if p.timer != nil {
		p.timer.Stop()
		p.timer = nil
	}
}

// close is the second phase.
func (l *Pods) close(p *pod) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.pods[p.rec.ContainerID] == p && p.rec.Phase == draining && p.timer != nil {
		l.enterLocked(p, closing, time.Time{})
	}
}

// persistLocked keeps p's state. A disk that takes nothing costs what a restart would
// remember, and no more.
func (l *Pods) persistLocked(p *pod) {
	if err := l.store.put(&p.rec); err != nil {
		l.Counts.StorageErrors.Inc()
		l.quiet.Warn("store", "a pod's state is not on disk: a restart would not know it", "pod", p.name(), "err", err)
	}
}

// SetPlace says where the node is once that is known, or has changed; rows follow while Run runs.
func (l *Pods) SetPlace(at Place) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if at == l.place || l.ended {
		return
	}
	l.place = at
	if l.moved = l.ctx == nil; !l.moved { // else the records are another process's yet
		l.moveLocked()
	}
}

// moveLocked has records and rows say where the node is.
func (l *Pods) moveLocked() {
	for _, p := range l.pods {
		if p.fault == nil {
			p.rec.Region, p.rec.Zone, p.rec.NodeIP = l.place.Region, l.place.Zone, l.place.NodeIP
			l.persistLocked(p)
			l.settleLocked(p.key(), false)
		}
	}
}

// Ready reports whether the pod's application answers, by the probe; false too for a
// container that is not known (contract 4.11: /-/-/ready). It never waits.
func (l *Pods) Ready(container string) bool {
	v, ok := l.views.Load(container)
	return ok && v.(*view).answers.Load()
}

// State of a pod.
type State struct {
	Pod, Container, Service, NetNS string
	Health                         string // as the row has it, or will once it is written; empty: it has no row
	Phase                          string // of its end; empty: it lives
	Answers                        bool   // its application, by the probe
	Fault                          string // why it is not served; empty: it is
}

// State tells of every pod, by name.
func (l *Pods) State() []State {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]State, 0, len(l.pods))
	for c, p := range l.pods {
		s := State{Pod: p.name(), Container: c, Service: p.service.String(), NetNS: p.rec.NetNS, Phase: string(p.rec.Phase), Answers: p.app.ok}
		if p.fault != nil {
			s.Fault = p.fault.Error()
		} else if e := l.rowOf(p); e != nil {
			s.Health = e.GetHealth().String()
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b State) int { return cmp.Or(cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container)) })
	return out
}

// spread is a moment of an interval that is the container's own.
func spread(container string, interval time.Duration) time.Duration {
	h := fnv.New64a()
	h.Write([]byte(container))
	return time.Duration(h.Sum64() % uint64(interval))
}
