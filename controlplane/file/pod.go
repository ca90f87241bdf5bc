package file

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"aether/controlplane/endpointmeta"
	"aether/controlplane/gamma"
	"aether/dataplane/model"
	"aether/mtls/spiffeid"
	"aether/tproxy/rules"
)

// ignoredNamespaces are never in the mesh, compared in lower case (contract 1.2).
var ignoredNamespaces = []string{"kube-system", "aether-system", "spire-mgmt", "spire-server", "spire-system"}

// The values of AnnotationPart.
const (
	partEndpoint = "endpoint"
	partWorkload = "workload"
)

// podFacts: what a Service's selector sees of a pod, and what a managed pod is.
type podFacts struct {
	namespace  string
	account    string // empty: it is not the mesh's
	labels     map[string]string
	namedPorts []namedPort

	endpoint *model.Endpoint // Region and Zone empty unless annotated
	ownPlace bool            // region or zone annotated
	part     string

	// What it is to the node it runs on.
	node     string
	workload *model.Workload
	own      *Pod      // the same, where another leads its life
	told     []problem // of the workload alone
}

type namedPort struct {
	name   string
	number uint16
	udp    bool
}

func (r *reader) pod(o gamma.Object) {
	var p corev1.Pod
	if r.Refuse(o, r.Strict(o, &p), gamma.Refused) {
		return
	}
	if p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		return // its address is free, and may be another's
	}
	r.words(o, &p)
	f := &podFacts{namespace: o.Namespace, labels: p.Labels, namedPorts: r.namedPorts(o, &p), part: p.Annotations[AnnotationPart], node: p.Spec.NodeName}
	key := ""
	switch managed := p.Labels[LabelManaged]; managed {
	case "true":
		if slices.Contains(ignoredNamespaces, strings.ToLower(o.Namespace)) {
			r.Report(o.String(), o.At("metadata", "namespace"), "namespace %s is never in the mesh: the pod is not served; move it, or drop label %s",
				o.Namespace, LabelManaged)
			break
		}
		if flaws := r.managed(o, &p, f); r.Refuse(o, flaws, "the pod is not served") {
			f.endpoint, f.workload, f.own = nil, nil, nil
			break
		}
		if f.endpoint != nil && f.endpoint.Cluster != "" {
			key = "Pod " + f.endpoint.Cluster + " " + o.Namespace + "/" + o.Name
		}
		switch f.part {
		case partEndpoint:
			key = fmt.Sprintf("endpoint %s %s/%s %s", f.endpoint.Cluster, o.Namespace, o.Name, f.endpoint.IP)
		case partWorkload:
			key = "workload " + o.Namespace + "/" + o.Name
		}
	case "", "false":
	default:
		r.Doubt = true
		r.Report(o.String(), o.At("metadata", "labels", LabelManaged),
			"label %s is %q, and only \"true\" puts a pod in the mesh: write \"true\" or \"false\"", LabelManaged, managed)
	}
	r.add(o, item{key: key, pod: f})
}

// words tells misspelt words that decide what a pod is, and that nothing else would tell: the pod is as it would be
// without them.
func (r *reader) words(o gamma.Object, p *corev1.Pod) {
	for _, k := range slices.Sorted(maps.Keys(p.Labels)) {
		if _, ok := p.Labels[LabelManaged]; !ok && k != gamma.LabelMeshService && strings.HasPrefix(k, "aether.io/") && gamma.Distance(k, LabelManaged) <= 2 {
			r.Report(o.String(), o.At("metadata", "labels", k), "label %.100s does not exist, and the pod is not in the mesh: write %s", k, LabelManaged)
		}
	}
	phases := []corev1.PodPhase{corev1.PodPending, corev1.PodRunning, corev1.PodSucceeded, corev1.PodFailed, corev1.PodUnknown}
	if f := p.Status.Phase; f != "" && !slices.Contains(phases, f) {
		r.Report(o.String(), o.At("status", "phase"), "status.phase %.100q does not exist, and counts as Running: write Pending, Running, Succeeded or Failed", f)
	}
	for i, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status != corev1.ConditionTrue && c.Status != corev1.ConditionFalse && c.Status != corev1.ConditionUnknown {
			r.Report(o.String(), o.At("status", "conditions", fmt.Sprint(i), "status"), "status.conditions[%d].status %.100q does not exist, and the pod counts as not ready: write \"True\" or \"False\"", i, c.Status)
		}
	}
}

// namedPorts: a named target port may name a port of any container that runs
// beside the application. One that cannot be a port is left out and told.
func (r *reader) namedPorts(o gamma.Object, p *corev1.Pod) []namedPort {
	var out []namedPort
	add := func(list string, i int, c *corev1.Container) {
		for j, port := range c.Ports {
			if port.Name == "" || port.Protocol == corev1.ProtocolSCTP {
				continue
			}
			bad := func(field, format string, args ...any) {
				r.Report(o.String(), o.At("spec", list, fmt.Sprint(i), "ports", fmt.Sprint(j), field), "spec.%s[%d].ports[%d].%s %s; no Service finds the port by its name",
					list, i, j, field, fmt.Sprintf(format, args...))
			}
			switch why := validation.IsValidPortName(port.Name); {
			case len(why) > 0:
				bad("name", "%.100q is no port's name: %s", port.Name, strings.Join(why, "; "))
			case port.ContainerPort <= 0 || port.ContainerPort >= 1<<16:
				bad("containerPort", "%d is no port: write a number from 1 to 65535", port.ContainerPort)
			case port.Protocol != "" && port.Protocol != corev1.ProtocolTCP && port.Protocol != corev1.ProtocolUDP:
				bad("protocol", "%.100q does not exist: write TCP or UDP", port.Protocol)
			default:
				out = append(out, namedPort{port.Name, uint16(port.ContainerPort), port.Protocol == corev1.ProtocolUDP})
			}
		}
	}
	for i := range p.Spec.Containers {
		add("containers", i, &p.Spec.Containers[i])
	}
	for i := range p.Spec.InitContainers {
		if c := &p.Spec.InitContainers[i]; c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			add("initContainers", i, c) // a sidecar
		}
	}
	return out
}

// managed fills f.endpoint and f.workload; flaws refuse the pod.
func (r *reader) managed(o gamma.Object, p *corev1.Pod, f *podFacts) []gamma.Flaw {
	var flaws []gamma.Flaw
	bad := func(line int, format string, args ...any) {
		flaws = append(flaws, gamma.Flaw{Line: line, Reason: fmt.Sprintf(format, args...)})
	}
	annotation := func(key string) int { return o.At("metadata", "annotations", key) }

	account, accountLine := p.Spec.ServiceAccountName, o.At("spec", "serviceAccountName")
	if account == "" {
		account = "default" // as admission does
	}
	if why := validation.IsDNS1123Label(account); len(why) > 0 {
		bad(accountLine, "spec.serviceAccountName: service account %q cannot name a mesh service: %s", account, strings.Join(why, "; "))
	}
	if why := validation.IsDNS1123Subdomain(p.Spec.NodeName); p.Spec.NodeName != "" && len(why) > 0 {
		bad(o.At("spec", "nodeName"), "spec.nodeName: node %.100q cannot be a name: %s", p.Spec.NodeName, strings.Join(why, "; "))
	}
	if p.Spec.HostNetwork {
		bad(o.At("spec", "hostNetwork"), "spec.hostNetwork: a pod on the host's network cannot be in the mesh, its network namespace is the node's: drop hostNetwork, or label %s", LabelManaged)
	}
	ips := podIPs(o, p, bad)

	meta, err := endpointmeta.Parse(o.Namespace, o.Name, p.Annotations)
	var wrong endpointmeta.Errors
	if errors.As(err, &wrong) {
		for _, e := range wrong {
			bad(annotation(e.Key), "annotation %s: %q: %s", e.Key, e.Value, e.Reason)
		}
	}
	flaws = append(flaws, r.OwnAnnotations(o, p.Annotations, AnnotationNetNS, AnnotationContainerID, AnnotationCluster,
		AnnotationRegion, AnnotationZone, AnnotationPart)...)
	if f.part != "" && f.part != partEndpoint && f.part != partWorkload {
		bad(annotation(AnnotationPart), "annotation %s: %q: write %s or %s, or drop it for both", AnnotationPart, f.part, partEndpoint, partWorkload)
	}
	netns, ok := p.Annotations[AnnotationNetNS]
	if !ok {
		netns = filepath.Join(r.o.NetNSDir, o.Namespace+"_"+o.Name)
	} else if !filepath.IsAbs(netns) || strings.Contains(netns, "\x00") {
		bad(annotation(AnnotationNetNS), "annotation %s: %q is not an absolute path: write one that begins with /", AnnotationNetNS, netns)
	}
	if id, ok := p.Annotations[AnnotationContainerID]; ok && id == "" {
		bad(annotation(AnnotationContainerID), "annotation %s: no ID: write the container's, or drop the annotation", AnnotationContainerID)
	}
	id := meta.SPIFFEID
	if id == "" {
		def, err := spiffeid.ForServiceAccount(r.o.TrustDomain, o.Namespace, account)
		if err != nil {
			bad(accountLine, "the pod has no identity: %v", err)
		}
		id = def.String()
	}
	if len(flaws) > 0 {
		return flaws
	}
	f.account = account

	for _, n := range meta.Notes {
		r.Report(o.String(), annotation(n.Key), "annotation %s: %q: %s", n.Key, n.Value, n.Reason)
	}
	if f.part != partWorkload {
		region, regional := p.Annotations[AnnotationRegion]
		zone, zonal := p.Annotations[AnnotationZone]
		f.ownPlace = regional || zonal
		f.endpoint = &model.Endpoint{
			Service:     model.ServiceName{Namespace: o.Namespace, Name: account},
			IP:          ips[0],
			Pod:         o.Name,
			Node:        p.Spec.NodeName,
			Cluster:     p.Annotations[AnnotationCluster],
			Region:      region,
			Zone:        zone,
			DefaultPort: meta.DefaultPort,
			Ports:       meta.Ports,
			Weight:      meta.Weight,
			Health:      health(p),
			SPIFFEID:    id,
			Metadata:    meta.Metadata,
		}
	}
	if f.part == partWorkload || f.part == "" && f.node != "" {
		container, ok := p.Annotations[AnnotationContainerID]
		switch {
		case ok:
		case r.o.OnPods != nil: // a successor of the same name is another one, and it names a file
			container = cmp.Or(string(p.UID), o.Namespace+"_"+o.Name)
		default:
			container = o.Namespace + "/" + o.Name
		}
		known := len(r.Problems)
		capture := r.capture(o, p.Annotations)
		f.told = slices.Clone(r.Problems[known:])
		r.Problems = r.Problems[:known]
		f.workload = &model.Workload{
			Namespace:   o.Namespace,
			Name:        o.Name,
			Account:     account,
			ContainerID: container,
			NetNS:       netns,
			IPs:         ips,
			SPIFFEID:    id,
			DefaultPort: meta.DefaultPort,
			Ports:       meta.Ports,
			Capture:     capture,
			Upstreams:   meta.Upstreams,
			UID:         string(p.UID),
			Volumes:     gamma.Volumes(p),
			UDSSocket:   meta.UDSSocket,
		}
		if r.o.OnPods != nil {
			preStop, grace := gamma.Termination(p)
			f.own = &Pod{
				Namespace: o.Namespace, Name: o.Name, UID: string(p.UID), Account: account, Container: container, NetNS: netns, IPs: ips,
				Labels: p.Labels, Annotations: p.Annotations, Volumes: gamma.Volumes(p),
				Terminating: p.DeletionTimestamp != nil, PreStop: preStop, Grace: grace,
			}
		}
	}
	return nil
}

func podIPs(o gamma.Object, p *corev1.Pod, bad func(int, string, ...any)) []netip.Addr {
	texts, at := []string(nil), []string{"status", "podIPs"}
	for _, ip := range p.Status.PodIPs {
		texts = append(texts, ip.IP)
	}
	if len(texts) == 0 && p.Status.PodIP != "" {
		texts, at = []string{p.Status.PodIP}, []string{"status", "podIP"}
	}
	if len(texts) == 0 {
		bad(o.At("status"), "status: no address: write status.podIPs") // contract 1.2: ignorable until it has one
		return nil
	}
	var ips []netip.Addr
	for i, s := range texts {
		ip, why := gamma.Address(s)
		if why != "" {
			field := "status.podIP"
			if len(p.Status.PodIPs) > 0 {
				field = fmt.Sprintf("status.podIPs[%d].ip", i)
			}
			bad(o.At(append(at, fmt.Sprint(i), "ip")...), "%s: pod address %q: %s", field, s, why)
			continue
		}
		ips = append(ips, ip)
	}
	return ips
}

// health: a pod without a Ready condition is one whose health nobody has told.
func health(p *corev1.Pod) model.Health {
	if p.DeletionTimestamp != nil {
		return model.Draining
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			if c.Status == corev1.ConditionTrue {
				return model.Healthy
			}
			return model.Unhealthy
		}
	}
	return model.HealthUnspecified
}

// capture reads contract 1.5; what cannot be read of it is left out and told.
func (r *reader) capture(o gamma.Object, annotations map[string]string) model.Capture {
	c, problems := rules.ParseAnnotations(annotations, r.o.RedirectAllDefault)
	r.Doubt = r.Doubt || len(problems) > 0
	for _, p := range problems {
		r.Report(o.String(), o.At("metadata", "annotations", p.Annotation), "annotation %s: %q: %s", p.Annotation, p.Entry, p.Reason)
	}
	for k := range annotations {
		switch k {
		case rules.AnnotationRedirectAll, rules.AnnotationExcludePorts, rules.AnnotationExcludeRanges:
		default:
			if strings.HasPrefix(k, "capture.aether.io/") {
				r.Report(o.String(), o.At("metadata", "annotations", k), "annotation %s does not exist and is ignored: the ones that do are %s, %s and %s",
					k, rules.AnnotationRedirectAll, rules.AnnotationExcludePorts, rules.AnnotationExcludeRanges)
			}
		}
	}
	return model.Capture{RedirectAll: c.RedirectAll, ExcludePorts: c.ExcludePorts, ExcludeRanges: c.ExcludeRanges}
}
