package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"aether/controlplane/endpointmeta"
	"aether/controlplane/gamma"
	"aether/controlplane/kube/follow"
	"aether/dataplane/model"
)

const (
	// maxPods is how many pods of its node are kept, finished ones among them: if there are
	// more, it is not known which there are.
	maxPods = 4096
	// maxMessage is what Kubernetes takes of an Event's message, in bytes.
	maxMessage = 1024
	// maxEventName is what it takes of an object's name.
	maxEventName = 253
)

// ErrNoPod: the API server has no pod of the name on the node.
var ErrNoPod = errors.New("the API server has no such pod on this node")

// Pod is a pod as the API server has it.
type Pod struct {
	Namespace, Name, UID string
	// Labels, of what is watched only the one that puts a pod in the mesh.
	Labels    map[string]string
	Addresses int
	// Live: it runs, is not being deleted, and had a network of its own made by its kubelet's
	// runtime, which is made anew with the pod.
	Live   bool
	mirror bool // of a file of its kubelet's, which makes it anew whatever becomes of this object; UID is the file's
	// Bare: it has no controller, which would make another one in its place.
	Bare bool
	// Leaving: its deletion timestamp is set. Gone: it is not there any more.
	Leaving, Gone bool
	// PreStop and Grace are how it leaves (contract 13.3); one that is gone has neither.
	PreStop, Grace time.Duration

	// What Get says beside.
	Account     string
	Annotations map[string]string
	Volumes     []model.Volume // never nil
}

// PodsConfig of Pods.
type PodsConfig struct {
	REST *rest.Config // of the API server; required
	Node string       // whose pods; required
	// Leaving is told of each pod that leaves, or has gone, perhaps more than once, one call
	// after the other. It returns soon. nil: nobody is.
	Leaving func(Pod)
	Log     *slog.Logger // nil: discard
}

// Pods follows the pods of one node, asks for single ones, and has them evicted. What it
// needs to be allowed is rbac-pods.yaml, no more and no less. Make it with NewPods. Safe for
// concurrent use.
type Pods struct {
	cfg  PodsConfig
	log  *slog.Logger
	core *rest.RESTClient

	mu      sync.Mutex
	pods    map[string]*keptPod // by namespace/name
	listed  bool
	over    bool          // there are more than are kept, or were at the last list
	err     error         // why changes are not heard of at the moment
	changed chan struct{} // closed and replaced when listed or err changes
}

// keptPod is what is kept of a pod.
type keptPod struct {
	metav1.ObjectMeta // name, namespace and version: what the client has to see
	pod               Pod
	told              int32 // how often its Event has been written
}

// NewPods makes Pods; they connect to nothing before Run, Get or Evict.
func NewPods(c PodsConfig) (*Pods, error) {
	if c.REST == nil || c.Node == "" {
		return nil, errors.New("kubernetes pods: REST and Node are required")
	}
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, corev1.SchemeGroupVersion)
	if err := errors.Join(corev1.AddToScheme(scheme), policyv1.AddToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("kubernetes pods: %w", err)
	}
	core, err := typed(client(c.REST), scheme, "/api", corev1.SchemeGroupVersion)
	if err != nil {
		return nil, fmt.Errorf("kubernetes pods: %w", err)
	}
	return &Pods{
		cfg: c, log: cmp.Or(c.Log, slog.New(slog.DiscardHandler)), core: core, pods: map[string]*keptPod{}, changed: make(chan struct{}),
	}, nil
}

// Run follows the node's pods until ctx ends; it then returns nil.
func (p *Pods) Run(ctx context.Context) error {
	lw := listWatch(p.core, "pods", fields.OneTermEqualSelector("spec.nodeName", p.cfg.Node).String(), "")
	follow.Objects(ctx, follow.Kind{Name: "pods", Example: &corev1.Pod{}, List: lw.ListWithContextFunc, Watch: lw.WatchFuncWithContext}, keepPod, p.hear)
	return nil
}

// List is all pods of the node, in no order. Before they have been read it waits. The error
// says why it is not known now which there are.
func (p *Pods) List(ctx context.Context) ([]Pod, error) {
	for {
		p.mu.Lock()
		err, listed, changed := p.err, p.listed, p.changed
		if p.over {
			err = cmp.Or(err, fmt.Errorf("node %s has more than %d pods: remove those that have finished", p.cfg.Node, maxPods))
		}
		if err != nil || listed {
			defer p.mu.Unlock()
			if err != nil {
				return nil, err
			}
			out := make([]Pod, 0, len(p.pods))
			for _, k := range p.pods {
				out = append(out, k.pod)
			}
			return out, nil
		}
		p.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("the pods of node %s have not been read yet: %w", p.cfg.Node, ctx.Err())
		}
	}
}

// Get asks the API server for a pod, as it is now. The error is ErrNoPod where it has none, or
// that is another node's, of which the UID is given.
func (p *Pods) Get(ctx context.Context, namespace, name string) (Pod, error) {
	var o corev1.Pod
	err := p.core.Get().Namespace(namespace).Resource("pods").Name(name).Do(ctx).Into(&o)
	switch {
	case apierrors.IsNotFound(err):
		return Pod{}, ErrNoPod
	case err != nil:
		return Pod{}, explainPods(err)
	}
	k := podOf(&o)
	if o.Spec.NodeName != p.cfg.Node {
		return Pod{UID: k.UID}, fmt.Errorf("%w: its node is %q, and this one %q: is --node its spec.nodeName?", ErrNoPod, o.Spec.NodeName, p.cfg.Node)
	}
	k.Labels, k.Annotations, k.Account = o.Labels, o.Annotations, o.Spec.ServiceAccountName
	k.Volumes = append([]model.Volume{}, gamma.Volumes(&o)...) // none are none: here the whole pod is known
	return k, nil
}

// Evict asks for a pod's eviction, which PodDisruptionBudgets may refuse, and leaves an Event
// on it that says why, and what came of it. It looks at the pod first: one that is another by
// now, or does not live any more, is left alone, which is an error.
func (p *Pods) Evict(ctx context.Context, of Pod, reason, message string) error {
	now, err := p.Get(ctx, of.Namespace, of.Name)
	switch {
	case err != nil:
		return fmt.Errorf("look at it first: %w", err)
	case now.UID != of.UID:
		return errors.New("another pod has its name by now")
	case !now.Live:
		return errors.New("it does not run any more, or leaves already")
	}
	uid := types.UID(of.UID)
	err = p.core.Post().Namespace(of.Namespace).Resource("pods").Name(of.Name).SubResource("eviction").Body(&policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: of.Namespace, Name: of.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}},
	}).MaxRetries(0).Do(ctx).Error() // who asks does so again; a server that says when would keep it here
	if err != nil {
		err = explainPods(err)
		message += "; that is refused for now, and tried again: " + err.Error()
	}
	p.event(ctx, of, reason, message)
	return err
}

// event writes a warning about a pod: one object a pod, which counts. What keeps it from being
// written is no reason to do anything else later.
func (p *Pods) event(ctx context.Context, of Pod, reason, message string) {
	times := int32(1)
	p.mu.Lock()
	if k := p.pods[of.key()]; k != nil && k.pod.UID == of.UID {
		k.told++
		times = k.told
	}
	p.mu.Unlock()
	h := fnv.New64a()
	fmt.Fprintf(h, "%s %s", of.UID, reason)
	end := fmt.Sprintf(".%x", h.Sum64())
	name := strings.TrimRight(of.Name[:min(len(of.Name), maxEventName-len(end))], "-.") + end
	now := metav1.Now()
	const by = "aether-proxy"
	e := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: of.Namespace, Name: name},
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: of.Namespace, Name: of.Name, UID: types.UID(of.UID)},
		Type:           corev1.EventTypeWarning, Reason: reason, Message: strings.ToValidUTF8(message[:min(len(message), maxMessage)], ""),
		Source: corev1.EventSource{Component: by, Host: p.cfg.Node}, ReportingController: by, ReportingInstance: p.cfg.Node,
		FirstTimestamp: now, LastTimestamp: now, Count: times,
	}
	create := func() error { return p.core.Post().Namespace(of.Namespace).Resource("events").Body(e).Do(ctx).Error() }
	again := func() error {
		change, err := json.Marshal(map[string]any{"message": e.Message, "lastTimestamp": now, "count": max(times, 2)})
		if err != nil {
			return err
		}
		return p.core.Patch(types.MergePatchType).Namespace(of.Namespace).Resource("events").Name(name).Body(change).Do(ctx).Error()
	}
	// Another process may have written it before, and the API server forgets Events.
	first, second, other := create, again, apierrors.IsAlreadyExists
	if times > 1 {
		first, second, other = again, create, apierrors.IsNotFound
	}
	err := first()
	if other(err) {
		err = second()
	}
	if err != nil {
		p.log.Warn("an Event cannot be written", "pod", of.key(), "reason", reason, "err", explainPods(err))
	}
}

func (p *Pod) key() string { return p.Namespace + "/" + p.Name }

// gone is p once it is not there any more.
func (p Pod) gone() Pod {
	p.Live, p.Leaving, p.Gone, p.PreStop, p.Grace = false, true, true, 0, 0
	return p
}

// hear takes what becomes of the pods.
func (p *Pods) hear(n follow.Event[*keptPod]) {
	var leave []Pod
	p.mu.Lock()
	switch n.Op {
	case follow.StatusChanged:
		p.faredLocked(n.Err)
	case follow.Replaced:
		old := p.pods
		p.pods, p.over = make(map[string]*keptPod, len(n.Objects)), false
		for _, o := range n.Objects {
			leave = p.setLocked(leave, o, old)
		}
		for _, was := range old {
			leave = leaves(leave, was.pod.gone())
		}
		if !p.listed {
			p.listed = true
			p.wakeLocked()
		}
	case follow.Removed:
		for _, o := range n.Objects {
			delete(p.pods, o.pod.key())
			leave = leaves(leave, o.pod.gone())
		}
	default:
		for _, o := range n.Objects {
			leave = p.setLocked(leave, o, p.pods)
		}
	}
	p.mu.Unlock()
	if p.cfg.Leaving == nil {
		return
	}
	for _, l := range leave {
		p.cfg.Leaving(l)
	}
}

// leaves adds to list a pod that leaves. With a mirror no container goes.
func leaves(list []Pod, p Pod) []Pod {
	if p.mirror {
		return list
	}
	return append(list, p)
}

// setLocked takes a pod, of which old has what was known, and adds to leave what leaves by it.
func (p *Pods) setLocked(leave []Pod, o *keptPod, old map[string]*keptPod) []Pod {
	key := o.pod.key()
	if was := old[key]; was != nil {
		delete(old, key)
		if was.pod.UID == o.pod.UID {
			o.told = was.told
		} else { // the old one's end was not heard of
			leave = leaves(leave, was.pod.gone())
		}
	}
	if o.pod.Leaving {
		leave = leaves(leave, o.pod)
	}
	if len(p.pods) >= maxPods {
		p.over = true
		return leave
	}
	p.pods[key] = o
	return leave
}

func (p *Pods) faredLocked(err error) {
	if apierrors.IsInvalid(err) && !p.listed {
		return // an older server, which streams no list: it is asked for one
	}
	if (err == nil) == (p.err == nil) {
		return
	}
	if p.err = err; err != nil {
		p.err = explainPods(err)
		p.log.Warn("kubernetes: the node's pods are not heard of at the moment", "reason", p.err)
	} else {
		p.log.Info("kubernetes: the node's pods are heard of again")
	}
	p.wakeLocked()
}

func (p *Pods) wakeLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// keepPod is what is kept of a pod. Strings are copied: the message that they were part of is not
// kept for them.
func keepPod(o runtime.Object) *keptPod {
	k := podOf(o.(*corev1.Pod))
	k.Namespace, k.Name, k.UID = strings.Clone(k.Namespace), strings.Clone(k.Name), strings.Clone(k.UID)
	m := o.(*corev1.Pod).ObjectMeta
	return &keptPod{ObjectMeta: metav1.ObjectMeta{Namespace: k.Namespace, Name: k.Name, ResourceVersion: strings.Clone(m.ResourceVersion)}, pod: k}
}

// podOf reads a pod; of its labels only what puts it in the mesh.
func podOf(o *corev1.Pod) Pod {
	file, mirror := o.Annotations[corev1.MirrorPodAnnotationKey] // its eviction makes nothing anew
	p := Pod{
		mirror:    mirror,
		Namespace: o.Namespace, Name: o.Name, UID: string(o.UID), Addresses: len(o.Status.PodIPs), Leaving: o.DeletionTimestamp != nil && !mirror,
		Bare: metav1.GetControllerOfNoCopy(o) == nil,
		Live: o.Status.Phase == corev1.PodRunning && o.DeletionTimestamp == nil && !o.Spec.HostNetwork && !mirror,
	}
	if mirror {
		p.UID = file // the kubelet's for it, which the runtime and plugins know it by
	}
	if o.Labels[endpointmeta.LabelManaged] == "true" {
		p.Labels = managedLabels
	}
	if p.Leaving {
		p.PreStop, p.Grace = gamma.Termination(o)
	}
	return p
}

// managedLabels are those of every managed pod that is kept; read only.
var managedLabels = map[string]string{endpointmeta.LabelManaged: "true"}

// explainPods says what an error means for whoever has to mend it.
func explainPods(err error) error {
	switch {
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%w: apply the ClusterRole of this version (rbac-pods.yaml)", err)
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("%w: the token is not accepted; check --kubeconfig, or the pod's ServiceAccount", err)
	}
	return err
}
