package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"aether/controlplane/endpointmeta"
	"aether/controlplane/input"
	"aether/controlplane/registry"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
	"aether/tproxy/netns"
)

// Bounds of the sweep (contract 13.4).
const (
	sweepInterval = time.Minute
	sweepPause    = 5 * time.Second  // between two, however often the registry is reached again
	listTimeout   = 20 * time.Second // of a listing, and of an eviction
	missedPasses  = 3                // before a stale namespace, or a lost pod, counts
	pruneFree     = 2                // so many records may go in a pass
	pruneShare    = 30               // percent of the pods that may go beyond that
	maxEvictions  = 2                // a pass
)

// ReasonAddLost is of the event on a pod that is evicted because its add was lost.
const ReasonAddLost = "AetherCNIAddLost"

const textAddLost = "the pod runs on this node and its mesh proxy does not know it: it is evicted, so that it is made anew"

// ErrNoPod is Cluster.Pod's.
var ErrNoPod = errors.New("the API server has no such pod on this node")

// Cluster is what the API server knows of the node's pods. Calls are bounded by their context
// alone.
type Cluster interface {
	// Pods are all pods of the node that it has, as it was last heard of; before that it is
	// waited for. An error: not known now.
	Pods(ctx context.Context) ([]ClusterPod, error)
	// Pod asks it for one of them as it is at the moment: names, UID, account, labels,
	// annotations, volumes, and whether it is Terminating. The error is ErrNoPod where the
	// node has none of the name; with the UID, where another node has it.
	Pod(ctx context.Context, namespace, name string) (Pod, error)
	// Evict asks for a pod's eviction, and leaves an event on it that says why. Called only
	// where Config.EvictLost.
	Evict(ctx context.Context, p ClusterPod, reason, message string) error
}

// ClusterPod is a pod as the API server has it.
type ClusterPod struct {
	Namespace, Name, UID string
	Labels               map[string]string
	Addresses            int
	// Live: it runs, is not being deleted, and has a network of its own.
	Live bool
	// Bare: it has no controller, which would make another one in its place.
	Bare bool
	// Leaving: its deletion timestamp is set. Termination counts then.
	Leaving bool
	// Gone: it is not there any more, however it went.
	Gone bool
	Termination
}

func (p *ClusterPod) name() string { return p.Namespace + "/" + p.Name }

func (p *ClusterPod) id() string { return cmp.Or(p.UID, p.name()) }

// lostPod is a live pod that is not here.
type lostPod struct {
	passes  int
	tries   int // evictions asked for
	evicted bool
	told    bool // it is a problem
}

// Resync asks for a sweep soon: the registry can be reached again. It does not wait.
func (l *Pods) Resync() {
	select {
	case l.resync <- struct{}{}:
	default:
	}
}

// sweeps runs until ctx ends: at the start, every minute, and when the registry is reached again.
func (l *Pods) sweeps(ctx context.Context) {
	every := time.NewTicker(sweepInterval)
	defer every.Stop()
	timed := false
	for {
		l.sweep(ctx, timed)
		pause := time.NewTimer(sweepPause)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return
		}
		select { // the time; or a reason
		case <-every.C:
			timed = true
		case <-l.resync:
			timed = false
		case <-ctx.Done():
			return
		}
	}
}

// sweep makes storage and registry agree, both directions (contract 13.4). What cannot
// be listed changes nothing. timed: it comes because of the time, and not sooner.
func (l *Pods) sweep(ctx context.Context, timed bool) {
	before := l.gens()
	rows, rowsErr := l.list(ctx)
	known, clusterErr := l.cluster(ctx)
	if ctx.Err() != nil {
		return
	}
	for what, err := range map[string]error{"the node's rows": rowsErr, "the node's pods": clusterErr} {
		// A registry that makes its rows of pods agrees with them by itself, and never with
		// what is registered: nothing is to be compared.
		if err != nil && !errors.Is(err, registry.ErrDerived) {
			l.Counts.SweepErrors.Inc()
			l.quiet.Warn("sweep "+what, "the sweep cannot list "+what+": that half waits for the next one", "err", err)
		}
	}
	l.tellCluster(clusterErr)
	l.prune(ctx, known)
	if rowsErr == nil {
		l.compare(rows, before)
	}
	if known != nil {
		l.evictLost(ctx, known, timed)
	}
}

// tellCluster makes it a problem that the API server's side is not known.
func (l *Pods) tellCluster(err error) {
	var problems []model.Problem
	if err != nil {
		problems = []model.Problem{{Object: "pods of node " + l.cfg.Place.Node, Reason: fmt.Sprintf("what the API server has of them is not known: %v; no pod is forgotten, or evicted, by its word", err)}}
	}
	if l.clusterTold || err != nil {
		l.cfg.Sink.Apply(input.Batch{Tables: input.Tables{Problems: map[string][]model.Problem{"cluster": problems}}})
	}
	l.clusterTold = err != nil
}

// list is the registry's side: nil and no error is an empty one.
func (l *Pods) list(ctx context.Context) ([]registry.Row, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	return l.cfg.Registry.OfNode(ctx, l.cfg.Place.Node)
}

// clusterPods are the API server's, by both of their names.
type clusterPods struct {
	list   []ClusterPod
	byUID  map[string]bool
	byName map[string]bool
}

// has reports whether the API server has p. A name may have been given anew.
func (c *clusterPods) has(p *pod) bool {
	if p.rec.UID != "" {
		return c.byUID[p.rec.UID]
	}
	return c.byName[p.name()]
}

// cluster is the API server's side; nil: it is not known.
func (l *Pods) cluster(ctx context.Context) (*clusterPods, error) {
	if l.cfg.Cluster == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	list, err := l.cfg.Cluster.Pods(ctx)
	if err != nil {
		return nil, err
	}
	c := &clusterPods{list, map[string]bool{}, map[string]bool{}}
	for i := range list {
		c.byUID[list[i].UID], c.byName[list[i].name()] = true, true
		if list[i].Leaving { // it may have been said before the pod was here
			l.Leaving(list[i])
		}
	}
	return c, nil
}

// gens are the states of rows that are wanted now: a listing that began later and
// contradicts them is right, if they are the same still.
func (l *Pods) gens() map[rowKey]uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make(map[rowKey]uint64, len(l.rows))
	for k, r := range l.rows {
		if r.tried == r.gen {
			out[k] = r.gen
		}
	}
	return out
}

// prune removes records of pods that are no more.
func (l *Pods) prune(ctx context.Context, known *clusterPods) {
	l.mu.Lock()
	pods := make([]*pod, 0, len(l.pods))
	var absent []*pod // of the API server's, as far as is known
	for _, p := range l.pods {
		pods = append(pods, p)
		// What came since the last pass is not judged: whoever is asked may not have heard of it.
		if known != nil && p.settled && !known.has(p) {
			absent = append(absent, p)
		}
	}
	l.mu.Unlock()
	slices.SortFunc(pods, func(a, b *pod) int { return cmp.Compare(a.rec.Order, b.rec.Order) })
	orphans := l.confirm(ctx, absent)
	gone := make(map[*pod]bool, len(pods)) // its namespace
	for _, p := range pods {
		if ctx.Err() != nil {
			return
		}
		err := l.cfg.NetNS(p.rec.NetNS) // not under the lock: it opens a file
		if err != nil && !errors.Is(err, netns.ErrGone) {
			l.quiet.Warn("netns", "a pod's network namespace cannot be looked at", "pod", p.name(), "err", err)
		}
		gone[p] = errors.Is(err, netns.ErrGone)
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	var stale []*pod
	for _, p := range pods {
		if l.pods[p.rec.ContainerID] != p {
			continue // removed, or added again, meanwhile
		}
		p.settled = true
		if orphans[p] {
			l.log.Warn("a pod that the API server does not have is forgotten", "pod", p.name(), "container", p.rec.ContainerID)
			if l.forgetLocked(p) == nil {
				l.Counts.OrphansPruned.Inc()
			}
			continue
		}
		if !gone[p] {
			p.stale = 0
			continue
		}
		if p.stale = min(p.stale+1, missedPasses); p.stale == missedPasses {
			stale = append(stale, p)
		}
	}
	if len(stale) > pruneFree && len(stale)*100 > len(l.pods)*pruneShare {
		l.Counts.PruneBreakerTripped.Inc()
		l.log.Error("too many network namespaces are gone at once: no pod is forgotten; look at the node's directory of namespaces, and whether its mounts reach this process",
			"gone", len(stale), "pods", len(l.pods))
		return
	}
	for _, p := range stale {
		l.log.Warn("a pod whose network namespace is gone is forgotten", "pod", p.name(), "container", p.rec.ContainerID, "netns", p.rec.NetNS)
		if l.forgetLocked(p) == nil {
			l.Counts.StalePruned.Inc()
		}
	}
}

// confirm asks the API server itself for pods that it is not known to have: whoever it was heard
// by may be behind. What cannot be asked now waits for the next pass.
func (l *Pods) confirm(ctx context.Context, absent []*pod) map[*pod]bool {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	out := make(map[*pod]bool, len(absent))
	for _, p := range absent {
		has, err := l.cfg.Cluster.Pod(ctx, p.rec.Namespace, p.rec.Name)
		switch {
		case errors.Is(err, ErrNoPod) && has.UID != "" && has.UID == p.rec.UID: // a pod never changes its node
			l.Counts.SweepErrors.Inc()
			l.quiet.Warn("node", "a pod of this node is another's to the API server: it is kept; start the proxy with the node's own name", "pod", p.name(), "err", err)
		case errors.Is(err, ErrNoPod):
			out[p] = true
		case err != nil:
			l.Counts.SweepErrors.Inc()
			l.quiet.Warn("confirm", "whether a pod is gone cannot be asked: it is kept for now", "pod", p.name(), "err", err)
			if ctx.Err() != nil {
				return out
			}
		default:
			out[p] = p.rec.UID != "" && has.UID != p.rec.UID
		}
	}
	return out
}

// compare makes the node's rows what storage says.
func (l *Pods) compare(rows []registry.Row, before map[rowKey]uint64) {
	listed := map[rowKey][]registry.Row{}
	latest := uint64(0)
	for _, r := range rows {
		// Another cluster may have a node of the same name.
		if r.Endpoint.GetKubernetesMetadata().GetNodeName() == l.cfg.Place.Node && r.Endpoint.GetClusterName() == l.cfg.Place.Cluster {
			k := rowKey{r.Service, r.IP}
			listed[k] = append(listed[k], r)
			latest = max(latest, registry.StatementOf(r.Endpoint).Stated)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.said = max(l.said, latest)
	keys := make(map[rowKey]bool, len(l.pods))
	for _, p := range l.pods {
		if p.fault == nil {
			keys[p.key()] = true
		}
	}
	for k := range listed {
		keys[k] = true
	}
	for k := range keys {
		if r := l.rows[k]; r != nil && before[k] != r.gen {
			continue // it changed since: the listing may be older
		}
		p := l.holderLocked(k)
		var want *registrypb.ServiceEndpoint
		if p != nil {
			want = l.rowOf(p)
		}
		have := listed[k]
		switch {
		case want == nil && len(have) == 0:
		case want == nil:
			l.Counts.GhostsRemoved.Inc()
			l.rarely.Warn("ghost "+k.service.String()+" "+k.ip, "a row of this node without a pod is removed", "service", k.service, "ip", k.ip,
				"pod", have[0].Endpoint.GetKubernetesMetadata().GetPodName())
			l.settleLocked(k, true)
		case len(have) == 0 && p.rec.Phase != alive:
			// It leaves: what has gone already does not come back.
		case len(have) == 0:
			l.Counts.MissingRegistered.Inc()
			l.rarely.Warn("missing "+k.service.String()+" "+k.ip, "a pod without its row is registered", "pod", p.name(), "service", k.service)
			l.settleLocked(k, true)
		default:
			same, extra := l.agrees(have, want)
			if same && !extra {
				continue
			}
			l.Counts.Corrected.Inc()
			l.rarely.Warn("wrong "+k.service.String()+" "+k.ip, "a row that does not say what its pod does is written anew", "pod", p.name(), "service", k.service)
			l.settleLocked(k, true)
			l.rows[k].anew = l.rows[k].anew || extra
		}
	}
}

// agrees reports whether the rows of one address say what is wanted under every class
// it serves (same), and whether there are some under others (extra).
func (l *Pods) agrees(have []registry.Row, want *registrypb.ServiceEndpoint) (same, extra bool) {
	classes := registry.Protocols(want)
	found := 0
	same = true
	for _, r := range have {
		if !slices.Contains(classes, r.Protocol) {
			extra = true
			continue
		}
		found++
		same = same && alike(r.Endpoint, want)
	}
	return same && found == len(classes), extra
}

// alike compares what a row says to others. Where the container is, who watches it, and
// when that was said, is not theirs.
func alike(a, b *registrypb.ServiceEndpoint) bool {
	plain := func(e *registrypb.ServiceEndpoint) *registrypb.ServiceEndpoint {
		c := proto.CloneOf(e)
		c.ContainerMetadata, c.HealthCheckMode, c.Stated = nil, 0, 0
		c.ProtoReflect().SetUnknown(nil)
		return c
	}
	return proto.Equal(plain(a), plain(b))
}

// evictLost evicts live pods whose add was lost (contract 13.4), those first that have been
// tried least. Where no add has ever come none would follow: nobody is evicted there. Only
// timed passes count, so that three of them are minutes, whatever comes and goes meanwhile.
func (l *Pods) evictLost(ctx context.Context, known *clusterPods, timed bool) {
	l.mu.Lock()
	here := map[string]bool{}
	for _, p := range l.pods {
		if here[p.rec.UID] = true; p.rec.UID == "" {
			here[p.name()] = true
		}
	}
	missing := map[string]bool{}
	problems := map[string][]model.Problem{}
	evicts := l.cfg.EvictLost && l.order > 0
	var evict []ClusterPod
	for _, p := range known.list {
		id := p.id()
		if !p.Live || endpointmeta.Ignorable(p.Namespace, p.Labels, p.Addresses) || here[id] || here[p.name()] {
			continue
		}
		missing[id] = true
		lost := l.lost[id]
		if lost == nil {
			lost = &lostPod{}
			l.lost[id] = lost
			l.Counts.MissingStorage.Inc()
		}
		if timed {
			lost.passes = min(lost.passes+1, missedPasses)
		}
		if lost.passes < missedPasses {
			continue
		}
		if !lost.told {
			lost.told = true
			problems["lost "+id] = []model.Problem{{Object: "Pod " + p.name(), Reason: "it runs on this node and is not served: its add never came, or was lost; make the pod anew"}}
		}
		if timed && evicts && !lost.evicted && !p.Bare { // a bare one would be gone for good
			evict = append(evict, p)
		}
	}
	for id, lost := range l.lost {
		if missing[id] {
			continue
		}
		if lost.told {
			problems["lost "+id] = nil
		}
		delete(l.lost, id)
	}
	slices.SortFunc(evict, func(a, b ClusterPod) int {
		return cmp.Or(cmp.Compare(l.lost[a.id()].tries, l.lost[b.id()].tries), cmp.Compare(a.name(), b.name()))
	})
	evict = evict[:min(len(evict), maxEvictions)]
	for _, p := range evict {
		l.lost[p.id()].tries++
	}
	l.mu.Unlock()
	if len(problems) > 0 {
		l.cfg.Sink.Apply(input.Batch{Tables: input.Tables{Problems: problems}})
	}
	for _, p := range evict {
		in, cancel := context.WithTimeout(ctx, listTimeout)
		err := l.cfg.Cluster.Evict(in, p, ReasonAddLost, textAddLost)
		cancel()
		if err != nil { // such as a PodDisruptionBudget: again with the next pass
			l.Counts.SweepErrors.Inc()
			l.rarely.Warn("evict "+p.name(), "a pod whose add was lost cannot be evicted", "pod", p.name(), "err", err)
			continue
		}
		l.Counts.LostAddEvictions.Inc()
		l.log.Warn("a pod whose add was lost is evicted", "pod", p.name(), "uid", p.UID)
		l.mu.Lock()
		if lost := l.lost[p.id()]; lost != nil {
			lost.evicted = true
		}
		l.mu.Unlock()
	}
}

func checkNetNS(path string) error {
	ns, err := netns.Open(path)
	if err != nil {
		return err
	}
	return ns.Close()
}
